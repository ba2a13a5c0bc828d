"""Leases of any kind of work."""

import pytest

from coordinator.core.work.leases import LeasedWork, WorkState, elapsed_ms, renew_lease
from hypergpu.ids import Slot
from hypergpu.units import Milliseconds

WORK = LeasedWork(slot=Slot(0), lease=3, assigned_at_ms=Milliseconds(100))


def test_a_pause_counts_nothing_against_the_node_that_goes_on_with_its_work() -> None:
    work = renew_lease(WORK, 7, Milliseconds(5_000))
    assert (work.lease, work.work) == (7, WorkState.PENDING)
    assert elapsed_ms(work, Milliseconds(5_400)) == elapsed_ms(WORK, Milliseconds(400))


@pytest.mark.parametrize("state", [WorkState.ON_TRIAL, WorkState.LATE, WorkState.UNDER_WAY])
def test_open_work_stays_in_its_state_after_a_pause(state: WorkState) -> None:
    before = LeasedWork(slot=Slot(0), lease=3, assigned_at_ms=Milliseconds(100), work=state)
    assert renew_lease(before, 4, Milliseconds(1)).work is state


def test_work_that_was_handed_back_is_tried_again_after_a_pause() -> None:
    before = LeasedWork(
        slot=Slot(0),
        lease=3,
        assigned_at_ms=Milliseconds(100),
        work=WorkState.HANDED_BACK,
        reason="the owner plays",
    )
    work = renew_lease(before, 4, Milliseconds(1))
    assert (work.work, work.reason, work.is_open) == (WorkState.PENDING, "", True)
