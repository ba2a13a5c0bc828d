"""The coordinator's own line in a world: plans know it, and let uploads wait for each other."""

from coordinator.core.measure.reading import StepTime, TransferDirection, TransferTime
from coordinator.core.plan.decision import PlanRequest, RoundPlan
from hypergpu.ids import NodeId, Slot
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples
from netsim.virtual.agenda import Agenda
from netsim.virtual.measuring import Gauges
from netsim.virtual.sizes import TransferSizes
from tests.simulation.test_planned_worlds import AWARE, SCHEMES

NODES = {NodeId("a"): Slot(0), NodeId("b"): Slot(1)}
SIZES = TransferSizes(whole=SCHEMES["fp32"], schemes=SCHEMES).for_plans()


def plan(line_bits_per_s: int) -> RoundPlan:
    """Two nodes that end together and upload at 10 Mbit/s each, where nobody is in their way."""
    gauges = Gauges(Agenda(), SIZES, seed=0, line_bits_per_s=line_bits_per_s)
    gauges.is_needed = True
    now_ms = Milliseconds(0)
    for node in NODES:
        gauges.note(node, StepTime(now_ms, 100, Milliseconds(10_000)))
        for way in TransferDirection:
            moved = TransferTime(now_ms, way, Bytes(1_250_000), Microseconds(1_000_000), 4)
            gauges.note(node, moved)
    work = Samples(1_000_000)
    return gauges.plan_round_now(PlanRequest(1, now_ms, AWARE, NODES, Samples(0), work), {})


def test_uploads_that_would_crowd_the_line_wait_for_each_other() -> None:
    first, second = sorted(part.upload_after_ms for part in plan(12_000_000).nodes.values())
    assert first == 0 < second


def test_nobody_waits_where_the_line_carries_all_or_has_no_limit() -> None:
    for line_bits_per_s in (0, 100_000_000):
        waits = {part.upload_after_ms for part in plan(line_bits_per_s).nodes.values()}
        assert waits == {0}
