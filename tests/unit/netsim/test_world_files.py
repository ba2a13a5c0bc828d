"""Every way in which a world file can be wrong says what, where and the fix."""

from pathlib import Path
from typing import get_args

import pytest

from netsim.link import RateShape
from netsim.link.error import NetsimError
from netsim.network.churn import churn_class
from netsim.network.profiles import PROFILES
from netsim.network.world import CrashFault, FaultEntry, HealEntry, WorldDescription
from netsim.network.world_file import parse_world, read_world_file

WORLDS = Path(__file__).parents[3] / "examples" / "worlds"
HOME = '[[nodes]]\nname = "attic"\nprofile = "home-cable"\n'
PAIR = '[[nodes]]\nname = "pair"\nprofile = "home-fibre"\ncount = 2\n'


def world_of(text: str) -> WorldDescription:
    return parse_world(text, source="w.toml")


@pytest.mark.parametrize("path", sorted(WORLDS.glob("*.toml")), ids=lambda path: path.stem)
def test_example_is_a_world_with_a_job(path: Path) -> None:
    world = read_world_file(path)
    assert world.name == path.stem
    assert world.job is not None
    assert world.job.training.nodes <= len(world.nodes)


def test_examples_have_the_sizes_that_they_promise() -> None:
    counts = {path.stem: len(read_world_file(path).nodes) for path in WORLDS.glob("*.toml")}
    assert counts == {"five-homes": 5, "eight-nodes": 8, "hostile": 6, "thousand": 1000}
    assert len({node.profile for node in read_world_file(WORLDS / "five-homes.toml").nodes}) == 5


def test_smallest_world_takes_every_default() -> None:
    world = world_of('[[nodes]]\nprofile = "B"\n')
    (node,) = world.nodes
    assert (node.name, node.group, node.link) == ("b", "b", PROFILES["B"].shape.link)
    assert (world.seed, world.job, world.faults, node.churn) == (0, None, (), None)
    assert world.coordinator.up.bits_per_s == world.coordinator.down.bits_per_s == 100_000_000


def test_group_becomes_numbered_nodes() -> None:
    assert [node.name for node in world_of(HOME + PAIR).nodes] == ["attic", "pair-1", "pair-2"]


def test_profile_is_adjusted_key_by_key() -> None:
    keys = "loss_percent = 3\nup_mbit_s = 5\nrate = { variation = 0.5, every = '2s' }\n"
    (node,) = world_of(f"{HOME}{keys}down = {{ delay_ms = 80, loss_percent = 0 }}\n").nodes
    base = PROFILES["home-cable"].shape.link
    assert (node.link.up.loss, node.link.up.bits_per_s) == (0.03, 5_000_000)
    assert (node.link.down.loss, node.link.down.delay_us) == (0.0, 80_000)
    assert node.link.down.bits_per_s == base.down.bits_per_s
    assert node.shape.variation.rate == RateShape(variation=0.5, every_ms=2000)  # type: ignore[arg-type]


def test_link_of_ones_own_needs_no_profile() -> None:
    (node,) = world_of("[[nodes]]\nrtt_ms = 60\nup_mbit_s = 1\ndown_mbit_s = 2\n").nodes
    assert node.link.rtt_us == 60_000


def test_churn_is_a_class_the_profiles_or_ones_own() -> None:
    own = 'churn = { session = { scale = "5m" }, absence = { scale = "10s" } }\n'
    text = f'churn = "profile"\n{HOME}{PAIR}churn = "c3"\n[[nodes]]\nprofile = "A"\n{own}'
    attic, pair, _, other = world_of(text).nodes
    assert (attic.churn, pair.churn) == (churn_class("c1"), churn_class("c3"))
    assert other.churn is not None
    assert other.churn.session.scale_s == 300


def test_faults_reach_nodes_groups_and_everybody_until_they_heal() -> None:
    text = f"""{HOME}{PAIR}
        [[faults]]
        kind = "partition"
        nodes = "all"
        at = "10s"
        [[faults]]
        kind = "heal"
        nodes = ["pair", "attic"]
        at = "25s"
        [[faults]]
        kind = "crash"
        nodes = ["pair-2", "coordinator"]
        at = "5s"
        for = "1s"
    """
    faults = world_of(text).faults
    assert [(each.target, each.at_us, each.until_us) for each in faults] == [
        ("pair-2", 5_000_000, 6_000_000),
        ("coordinator", 5_000_000, 6_000_000),
        ("attic", 10_000_000, 25_000_000),
        ("pair-1", 10_000_000, 25_000_000),
        ("pair-2", 10_000_000, 25_000_000),
    ]


def test_each_kind_of_fault_knows_its_numbers() -> None:
    faults = read_world_file(WORLDS / "hostile.toml").faults
    assert {HealEntry, *map(type, faults)} == set(get_args(FaultEntry))
    numbers = {
        (each.kind, name, getattr(each, name))
        for each in faults
        for name in set(each.__struct_fields__) - set(CrashFault.__struct_fields__)
    }
    assert numbers == {
        ("flap", "every_ms", 8_000),
        ("slow_disk", "mib_per_s", 2),
        ("clock_jump", "by_s", -3600),
        ("corrupt", "percent", 50),
        ("lie", "factor", -5),
        ("slow_device", "factor", 3),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "w.toml nodes: no nodes. Fix: add"),
        ("nodes = 3", "w.toml:1 nodes: it is the number 3, not a list. Fix: give a list"),
        ("seed = ", "w.toml:1: it is not TOML"),
        (f"sede = 1\n{HOME}", "w.toml:1 sede: there is no key sede here. Fix: did you mean seed"),
        (f"{HOME}rtt = 60\n", r"w.toml:4 nodes\[1\].rtt: .* did you mean rtt_ms"),
        (f"{HOME}up_kbit_s = 60\n", "did you mean up_mbit_s"),
        (f"{HOME}rtt_s = 1\n", "did you mean rtt_ms. Units are part of the name"),
        (
            f"{HOME}up_mbit_s = -5\n",
            r"w.toml:4 nodes\[1\].up_mbit_s: .* a number >= 0",
        ),
        (f"{HOME}loss_percent = 120\n", "it is the number 120. Fix: give a number <= 99.9"),
        (f'{HOME}rtt_ms = "60"\n', 'it is the text "60", not a number'),
        (f"{HOME}loss_percent = 60\nburst_packets = 1\n", "w.toml:1 nodes.*cannot come in bursts"),
        (f"{HOME}jitter_ms = 90\n", "exceeds the delay.*Fix: lower the jitter"),
        ('[[nodes]]\nprofile = "home-cabel"\n', 'w.toml:2 .*did you mean "home-cable"'),
        ("[[nodes]]\nup_mbit_s = 5\ndown_mbit_s = 5\n", "rtt_ms is missing. Fix: give rtt_ms"),
        (HOME + HOME, r'w.toml:5 nodes\[2\].name: "attic" is taken'),
        (f'{HOME}[[nodes]]\nname = "all"\nprofile = "A"\n', '"all" is no name for nodes'),
        (f"{HOME}count = 30000\n", "it is the number 30000. Fix: give a whole number <= 20000"),
        (f'{HOME}churn = "c9"\n', 'there is no churn "c9"'),
        (f'{HOME}trace = "a.csv"\n', "w.toml:4 .*there is no file a.csv beside a text"),
        (f'{HOME}congestion_control = "vegas"\n', '"vegas" is unknown. Fix: choose one of cubic'),
        (f"{HOME}rate = {{ variation = 99 }}\n", "rate.variation: it is the number 99"),
        (f'{HOME}episodes = [{{ every = "1s", least = "2s", most = "3s" }}]\n', "most < every"),
        (f'[job]\nworkload = "digits"\n{HOME}', r"w.toml:2 .job. workload: there is no workload"),
        (f'job = "x.toml"\n{HOME}', "w.toml:1 job: there is no file x.toml"),
        (f"{HOME}[coordinator]\nup_mbit_s = 'fast'\n", "w.toml:5 .coordinator. up_mbit_s"),
    ],
)
def test_wrong_file_is_refused_with_place_and_fix(text: str, said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        world_of(text)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('kind = "crsh"', r'w.toml:5 faults\[1\].kind: .*did you mean "crash"'),
        ('kind = "crash"\nnodes = "all"', "at is missing. Fix: add at"),
        ('kind = "crash"\nat = 30', 'w.toml:6 .*30 has no unit. Fix: .*"30s"'),
        ('kind = "crash"\nat = "30s"', "nodes is missing"),
        ('kind = "crash"\nat = "30s"\nnodes = "atic"', 'did you mean "attic"'),
        ('kind = "lie"\nat = "30s"\nnodes = "coordinator"', "the coordinator has no lie"),
        ('kind = "flap"\nat = "30s"\nnodes = "all"', "every is missing"),
        ('kind = "crash"\nat = "1s"\nfor = "0s"\nnodes = "all"', "a fault of no length"),
        ('kind = "crash"\nat = "1s"\nevery = "2s"\nnodes = "all"', "there is no key every here"),
    ],
)
def test_wrong_fault_is_refused_with_place_and_fix(fault: str, said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        world_of(f"{HOME}[[faults]]\n{fault}\n")


def test_files_are_found_beside_the_world(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("time_s,up_mbit_s\n0,1\n1,2\n")
    (tmp_path / "job.toml").write_text('workload = "digits-softmax"\n')
    path = tmp_path / "w.toml"
    path.write_text(f'job = "job.toml"\n{HOME}trace = "a.csv"\n')
    world = read_world_file(path)
    assert world.job is not None
    assert len(world.nodes[0].shape.traces[0].rows) == 2


def test_trace_that_makes_the_link_impossible_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("time_s,delay_ms\n0,30\n1,1\n")
    path = tmp_path / "w.toml"
    path.write_text(f'{HOME}trace = "a.csv"\n')
    with pytest.raises(NetsimError, match="exceeds the delay"):
        read_world_file(path)
