"""World files and their mistakes; a world's course, its picture, what it does to real programs."""

from itertools import pairwise
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest

from netsim.link import NatKind, NetsimError, RateShape
from netsim.network.picture import LANES_MAX, world_svg
from netsim.network.profiles import PROFILES
from netsim.network.timeline import (
    ActionKind,
    WorldAction,
    WorldCourse,
    require_real_faults,
    timeline,
)
from netsim.network.world import CrashFault, FaultEntry, HealEntry, WorldDescription, churn_class
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
    small = {"five-homes": 5, "unequal-devices": 3}
    assert counts == {**small, "eight-nodes": 8, "hostile": 6, "thousand": 1000}
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
        (f'{HOME}nat = "cone"\n', '"cone" is unknown. Fix: did you mean "full-cone"'),
        (f'[coordinator]\nnat = "symmetric"\n{HOME}', "w.toml:2 .* there is no key nat here"),
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


def test_a_group_stands_behind_the_nat_that_the_file_states_and_others_behind_none() -> None:
    pair, attic = world_of(f'{PAIR}nat = "port-restricted"\n{HOME}').nodes[1:]
    assert (pair.shape.nat, attic.shape.nat) == (NatKind.PORT_RESTRICTED, None)
    assert all(each.shape.nat is None for each in PROFILES.values())


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


SECOND_US = 1_000_000
WORLD = parse_world(
    """
    seed = 3
    [[nodes]]
    name = "attic"
    profile = "A"
    [[nodes]]
    name = "van"
    profile = "lte-moving"
    churn = { session = { scale = "60s" }, absence = { scale = "5s" } }
    [[faults]]
    kind = "flap"
    nodes = "attic"
    at = "10s"
    for = "9s"
    every = "4s"
    [[faults]]
    kind = "partition"
    nodes = "attic"
    at = "30s"
    """,
    source="w.toml",
)


def test_flap_cuts_for_half_of_each_turn_and_a_partition_for_good() -> None:
    changes = WorldCourse(WORLD).changes("attic", 100 * SECOND_US)
    assert [(at_us // SECOND_US, state.is_cut) for at_us, state in changes] == [
        (0, False),
        (10, True),
        (12, False),
        (14, True),
        (16, False),
        (18, True),
        (19, False),
        (30, True),
    ]


def test_changes_of_all_nodes_come_in_order_of_time() -> None:
    changes = list(WorldCourse(WORLD).all_changes(60 * SECOND_US))
    assert all(before[:2] < after[:2] for before, after in pairwise(changes))
    assert {name for _, name, _ in changes} == {"attic", "van"}
    alone = list(WorldCourse(WORLD).changes("van", 60 * SECOND_US))
    assert [(at_us, state) for at_us, name, state in changes if name == "van"] == alone


def test_churn_takes_away_those_who_have_it() -> None:
    course = WorldCourse(WORLD)
    assert list(course.absences("attic", 3600 * SECOND_US)) == []
    away = list(course.absences("van", 3600 * SECOND_US))
    assert 20 < len(away) < 120
    assert away == list(WorldCourse(WORLD).absences("van", 3600 * SECOND_US))


def test_another_node_moves_nobodys_dice() -> None:
    more = parse_world(
        'seed = 3\n[[nodes]]\nname = "first"\nprofile = "stress"\n'
        '[[nodes]]\nname = "van"\nprofile = "lte-moving"\n',
        source="w.toml",
    )
    looks = [WorldCourse(each).state("van", 5 * SECOND_US) for each in (more, WORLD)]
    assert looks[0] == looks[1]


SVG = "{http://www.w3.org/2000/svg}"
MINUTE_US = 60_000_000


def words_of(picture: str) -> set[str]:
    root = ET.fromstring(picture)  # noqa: S314 - our own text
    return {element.text or "" for element in root.iter(f"{SVG}text")}


def test_every_node_has_its_lane_with_scales_and_faults() -> None:
    words = words_of(world_svg(read_world_file(WORLDS / "hostile.toml"), 4 * MINUTE_US))
    assert {"steady", "storm-1", "storm-2", "bursts", "van", "liar", "coordinator"} <= words
    assert {"Mbit/s", "20", "500 ms", "5 %", "4 min", "time since the start"} <= words
    assert {"cut off", "flapping", "lies", "corrupts", "clock jump", "slow disk", "crash"} <= words
    assert "slow device" in words


def test_same_world_gives_the_same_picture() -> None:
    path = WORLDS / "five-homes.toml"
    first = world_svg(read_world_file(path), MINUTE_US)
    assert first == world_svg(read_world_file(path), MINUTE_US)


def test_picture_of_a_thousand_shows_the_first_and_says_so() -> None:
    picture = world_svg(read_world_file(WORLDS / "thousand.toml"), MINUTE_US)
    assert f"1000 nodes, the first {LANES_MAX} shown; begins at 12:00, seed 1000" in picture
    assert len(picture) < 2_000_000


def test_names_cannot_bend_the_picture() -> None:
    world = parse_world('name = "<b>&"\n[[nodes]]\nprofile = "A"\n', source="w.toml")
    assert "<b>&" in words_of(world_svg(world, MINUTE_US))


def test_unlimited_link_without_loss_says_so() -> None:
    text = "[[nodes]]\nrtt_ms = 0\nup_mbit_s = 0\ndown_mbit_s = 0\n"
    words = words_of(world_svg(parse_world(text, source="w.toml"), MINUTE_US))
    assert {"no limit on the rate", "no loss", "own link"} <= words


def test_picture_of_no_time_is_refused() -> None:
    with pytest.raises(NetsimError, match="above 0"):
        world_svg(read_world_file(WORLDS / "five-homes.toml"), 0)


NODES = """
[[nodes]]
name = "a"
profile = "lte-moving"
[[nodes]]
name = "b"
profile = "lan"
"""


def world(faults: str, more: str = "") -> WorldDescription:
    return parse_world(f"seed = 5\n{more}\n{NODES}\n{faults}", source="test")


def fault(kind: str, nodes: str, at: str, more: str = "") -> str:
    return f'[[faults]]\nkind = "{kind}"\nnodes = "{nodes}"\nat = "{at}"\n{more}\n'


def actions(described: WorldDescription, until_s: float = 60) -> list[tuple[float, str, str]]:
    world_actions = timeline(described, round(until_s * SECOND_US))
    return [(action.at_us / SECOND_US, action.kind, action.target) for action in world_actions]


def test_links_that_vary_by_themselves_are_no_actions() -> None:
    assert actions(world("")) == []


def test_a_crash_is_a_kill_and_a_start() -> None:
    crash = fault("crash", "a", "2s", 'for = "3s"')
    assert actions(world(crash)) == [(2, "kill", "a"), (5, "start", "a")]


def test_a_crash_for_good_is_never_started_again() -> None:
    assert actions(world(fault("crash", "coordinator", "2s"))) == [(2, "kill", "coordinator")]


def test_a_partition_is_a_cut_and_a_heal() -> None:
    partition = fault("partition", "all", "0s", 'for = "1s"')
    assert actions(world(partition)) == [
        (0, "cut", "a"),
        (0, "cut", "b"),
        (1, "heal", "a"),
        (1, "heal", "b"),
    ]


def test_a_slow_device_is_slow_and_then_as_before() -> None:
    slow = fault("slow_device", "c", "2s", 'for = "3s"\nfactor = 3')
    description = world(slow, '[[nodes]]\nname = "c"\nprofile = "lan"\nstep_floor_ms = 50')
    assert actions(description) == [(2, "impair", "c"), (5, "repair", "c")]
    factors = {each.slowness for each in timeline(description, 60 * SECOND_US)}
    assert factors == {3.0}


def test_a_device_without_a_step_floor_cannot_become_slow() -> None:
    with pytest.raises(NetsimError, match="a has a slow device") as failure:
        world(fault("slow_device", "a", "2s", "factor = 3"))
    assert "step_floor_ms" in failure.value.fix


def test_actions_of_all_faults_come_in_order_of_time() -> None:
    crash = fault("crash", "a", "2s", 'for = "10s"')
    partition = fault("partition", "b", "1s", 'for = "4s"')
    assert actions(world(crash + partition)) == [
        (1, "cut", "b"),
        (2, "kill", "a"),
        (5, "heal", "b"),
        (12, "start", "a"),
    ]


def test_nothing_is_done_after_the_end() -> None:
    assert actions(world(fault("crash", "a", "2s", 'for = "3s"')), until_s=5) == [(2, "kill", "a")]


def test_churn_takes_nodes_away_and_brings_them_back_in_turns() -> None:
    action_list = actions(world("", 'churn = "stress"\nchurn_speed = 60'), until_s=600)
    assert action_list == sorted(action_list, key=lambda action: action[0])
    for name in ("a", "b"):
        kinds = [kind for _, kind, whose in action_list if whose == name]
        assert len(kinds) > 2
        assert kinds == (["kill", "start"] * len(kinds))[: len(kinds)]


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("slow_disk", "mib_per_s = 5", "no disk"),
        ("clock_jump", "by_s = 60", "clock stays"),
        ("corrupt", "", "encrypted and signed"),
        ("lie", "", "does not lie"),
        ("silent", "", "does its work"),
    ],
)
def test_what_real_programs_cannot_be_given_is_refused(kind: str, more: str, why: str) -> None:
    with pytest.raises(NetsimError, match=f"{kind} of a .*{why}") as failure:
        require_real_faults(world(fault(kind, "a", "1s", more)))
    assert "--backend world" in failure.value.fix


def test_what_real_programs_can_be_given_is_not_refused() -> None:
    faults = fault("crash", "a", "1s") + fault("flap", "b", "1s", 'every = "2s"')
    require_real_faults(world(faults + fault("partition", "b", "9s")))


@pytest.mark.parametrize("kind", ActionKind)
def test_every_action_names_its_victim(kind: ActionKind) -> None:
    assert "cellar" in WorldAction(0, kind, "cellar").sentence
