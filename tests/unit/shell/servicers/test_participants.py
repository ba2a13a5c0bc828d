"""Who is told of as working in the open round: participants first, then who rests and why."""

from msgspec.structs import replace

from coordinator.core.job.events import RoundPlanned
from coordinator.shell.runtime.connected_nodes import ConnectedNodes
from coordinator.shell.servicers.user.watch import participants
from tests.unit.job_states import ALICE, BOB, after, at, node_plan, planning, round_plan


def test_a_resting_node_is_told_with_its_reason() -> None:
    plan = replace(round_plan(0, {ALICE: node_plan(3)}), resting={BOB: "too slow for this round"})
    job = after(planning(), RoundPlanned(at_ms=at(40), plan=plan))
    working, resting = participants(ConnectedNodes(), job)
    assert (working.node_id, working.reason) == (ALICE, "H=3, int4, as planned")
    assert (resting.node_id, resting.state) == (BOB, "resting")
    assert (resting.reason, resting.steps_total) == ("too slow for this round", 0)
    assert resting.slot == job.members[BOB].slot


def test_between_rounds_nobody_is_told() -> None:
    assert participants(ConnectedNodes(), planning()) == []
