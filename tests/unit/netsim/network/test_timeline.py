"""What a world does to real programs, and when."""

import pytest

from netsim.link.error import NetsimError
from netsim.network.timeline import ActionKind, WorldAction, require_real_faults, timeline
from netsim.network.world import WorldDescription
from netsim.network.world_file import parse_world

SECOND_US = 1_000_000
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
    found = timeline(described, round(until_s * SECOND_US))
    return [(action.at_us / SECOND_US, action.kind, action.target) for action in found]


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
    described = world(slow, '[[nodes]]\nname = "c"\nprofile = "lan"\nstep_floor_ms = 50')
    assert actions(described) == [(2, "impair", "c"), (5, "repair", "c")]
    factors = {each.slowness for each in timeline(described, 60 * SECOND_US)}
    assert factors == {3.0}


def test_a_device_without_a_step_floor_cannot_become_slow() -> None:
    with pytest.raises(NetsimError, match="a has a slow device") as refused:
        world(fault("slow_device", "a", "2s", "factor = 3"))
    assert "step_floor_ms" in refused.value.fix


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
    found = actions(world("", 'churn = "stress"\nchurn_speed = 60'), until_s=600)
    assert found == sorted(found, key=lambda action: action[0])
    for name in ("a", "b"):
        kinds = [kind for _, kind, whose in found if whose == name]
        assert len(kinds) > 2
        assert kinds == (["kill", "start"] * len(kinds))[: len(kinds)]


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("slow_disk", "mib_per_s = 5", "no disk"),
        ("clock_jump", "by_s = 60", "clock stays"),
        ("corrupt", "", "encrypted and signed"),
        ("lie", "", "does not lie"),
    ],
)
def test_what_real_programs_cannot_be_given_is_refused(kind: str, more: str, why: str) -> None:
    with pytest.raises(NetsimError, match=f"{kind} of a .*{why}") as refused:
        require_real_faults(world(fault(kind, "a", "1s", more)))
    assert "--backend world" in refused.value.fix


def test_what_real_programs_can_be_given_is_not_refused() -> None:
    faults = fault("crash", "a", "1s") + fault("flap", "b", "1s", 'every = "2s"')
    require_real_faults(world(faults + fault("partition", "b", "9s")))


@pytest.mark.parametrize("kind", ActionKind)
def test_every_action_names_its_victim(kind: ActionKind) -> None:
    assert "cellar" in WorldAction(0, kind, "cellar").sentence
