from coordinator.core.plan.decision import (
    NodeMemory,
    NodePlan,
    NodeResult,
    PlanMemory,
    PlanRequest,
)
from coordinator.core.plan.participation import Part, parts, remembered
from hypergpu.ids import Slot
from hypergpu.units import Milliseconds, Samples
from tests.unit.plan.fleet import names, spec

NODES = names(5)
SLOW = NODES[0]
PART = NodePlan(20, "int4", Milliseconds(1), Milliseconds(1), "")


def _part(
    spans: float, memory: NodeMemory | None = None, *, took_ms: int | None = 1, quorum: float = 0.6
) -> Part:
    """The slow node's part when it needs so many spans; None: it had no part in the last round."""
    memory = memory or NodeMemory("int4")
    took = dict.fromkeys(NODES, 1) | {SLOW: took_ms or 0}
    if took_ms is None:
        del took[SLOW]
    request = PlanRequest(
        round=10,
        at_ms=Milliseconds(0),
        spec=spec(nodes=5, quorum=quorum),
        candidates={node: Slot(slot) for slot, node in enumerate(NODES)},
        samples_done=Samples(0),
        samples_total=Samples(1_000_000),
        previous=PlanMemory(20, 0, is_sparse=False, nodes={SLOW: memory}),
        results={node: NodeResult(PART, Milliseconds(ms)) for node, ms in took.items()},
    )
    needs = dict.fromkeys(NODES, 0.5) | {SLOW: spans}
    return parts(request, remembered(request), needs)[SLOW]


def test_a_node_that_fits_takes_part() -> None:
    assert _part(1.2).is_taking_part


def test_a_node_that_needs_twice_the_round_takes_part_in_every_other_one() -> None:
    rests = _part(2.0)
    assert not rests.is_taking_part
    assert rests.reason.endswith("takes part again in round 11")
    assert _part(2.0, rests.memory, took_ms=None).is_taking_part


def test_a_node_that_needs_far_too_long_is_excluded_and_tried_again() -> None:
    excluded = _part(4.0)
    assert not excluded.is_taking_part
    assert excluded.reason == (
        "excluded: needs 4.0 times as long as the round; tries again in round 12"
    )


def test_each_exclusion_in_a_row_is_twice_as_long() -> None:
    waits = [_part(4.0, NodeMemory("int4", retries=n)).memory.rests_until_round for n in range(6)]
    assert waits == [12, 14, 18, 26, 42, 42]


def test_a_node_on_trial_takes_part_and_nobody_waits_for_it() -> None:
    trial = _part(4.0, NodeMemory("int4", rests_until_round=10, retries=1), took_ms=None)
    assert trial.is_taking_part
    assert not trial.may_stretch


def test_a_node_that_was_late_three_times_in_a_row_is_excluded() -> None:
    assert _part(1.0, NodeMemory("int4", cut_rounds=1), took_ms=0).is_taking_part
    assert not _part(1.0, NodeMemory("int4", cut_rounds=2), took_ms=0).is_taking_part


def test_nobody_rests_whom_the_quorum_needs() -> None:
    assert _part(4.0, quorum=1.0).reason == "slow, needed for the quorum"


def test_a_node_that_is_fast_again_is_forgiven() -> None:
    part = _part(1.0, NodeMemory("int4", retries=3))
    assert part.is_taking_part
    assert part.memory == NodeMemory("int4")
