"""One suite for every kind of work: what is handed back or lost goes to others, and counts once."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from coordinator.core.work.work_events import (
    JobPaused,
    JobResumed,
    NodeDraining,
    NodeJoined,
    NodeLost,
    StampedEvent,
)
from hypergpu.assignment import FailureCause, Lease
from hypergpu.ids import NodeId
from tests.kinds.at_work import NOW_MS, AtWork, echo_at_work, farm_at_work, training_at_work
from tests.unit.job_states import ALICE, BOB, CAROL

LOST = NodeLost(at_ms=NOW_MS, node=ALICE, reason="silent")


@pytest.fixture(params=[training_at_work, echo_at_work, farm_at_work])
def at_work(request: pytest.FixtureRequest) -> AtWork:
    make: Callable[[], AtWork] = request.param
    return make()


def hand_back(at_work: AtWork, node: NodeId, lease: Lease) -> StampedEvent:
    event = at_work.kind.hand_back_event(node, lease, "too hot", FailureCause.OTHER)
    return replace(event, at_ms=NOW_MS)


def test_two_nodes_have_leases_of_their_own(at_work: AtWork) -> None:
    assert at_work.lease_of(ALICE) != at_work.lease_of(BOB)


def test_nothing_is_accepted_under_a_lease_that_was_handed_back(at_work: AtWork) -> None:
    lease = at_work.lease_of(ALICE)
    back = hand_back(at_work, ALICE, lease)
    after = at_work.after(back)
    assert at_work.kind.rejection(after.job, back)
    assert at_work.kind.rejection(after.job, at_work.result(after.job, ALICE, lease))


def test_work_that_is_handed_back_goes_to_a_node_that_is_free(at_work: AtWork) -> None:
    lease = at_work.lease_of(ALICE)
    join_event = NodeJoined(at_ms=NOW_MS, node=CAROL)
    after = at_work.after(hand_back(at_work, ALICE, lease), join_event)
    fresh = after.lease_of(CAROL)
    assert fresh.number > lease.number
    assert not after.kind.rejection(after.job, after.result(after.job, CAROL, fresh))


def test_work_of_a_node_that_is_gone_goes_to_another(at_work: AtWork) -> None:
    lease = at_work.lease_of(ALICE)
    after = at_work.after(LOST, NodeJoined(at_ms=NOW_MS, node=CAROL))
    assert after.lease_of(CAROL).number > lease.number
    assert not after.kind.pending(after.job, ALICE)
    assert after.kind.rejection(after.job, after.result(after.job, ALICE, lease))


def test_a_result_counts_once(at_work: AtWork) -> None:
    result = at_work.result(at_work.job, ALICE, at_work.lease_of(ALICE))
    after = at_work.after(result)
    assert after.kind.rejection(after.job, result)


def test_a_node_that_leaves_may_finish_what_it_has(at_work: AtWork) -> None:
    lease = at_work.lease_of(ALICE)
    drained_job = at_work.after(NodeDraining(at_ms=NOW_MS, node=ALICE, reason="asked for"))
    after = drained_job.after(drained_job.result(drained_job.job, ALICE, lease))
    assert not after.kind.pending(after.job, ALICE)


def test_a_pause_voids_leases_and_a_resume_gives_fresh_ones(at_work: AtWork) -> None:
    lease = at_work.lease_of(ALICE)
    paused_job = at_work.after(JobPaused(at_ms=NOW_MS))
    assert paused_job.kind.is_paused(paused_job.job)
    assert not paused_job.kind.pending(paused_job.job, ALICE)
    resumed_job = paused_job.after(JobResumed(at_ms=NOW_MS))
    assert resumed_job.lease_of(ALICE).number > lease.number
    assert resumed_job.kind.rejection(
        resumed_job.job, resumed_job.result(resumed_job.job, ALICE, lease)
    )


def test_a_job_pauses_with_the_reasons_once_everybody_handed_back(at_work: AtWork) -> None:
    after = at_work
    for _ in range(20):
        nodes = [node for node in (ALICE, BOB) if after.kind.pending(after.job, node)]
        if not nodes:
            break
        after = after.after(hand_back(after, nodes[0], after.lease_of(nodes[0])))
    assert after.kind.is_paused(after.job)
    assert "too hot" in after.job.reason
