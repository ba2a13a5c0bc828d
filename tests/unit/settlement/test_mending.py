import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import (
    Epoch,
    EpochState,
    Part,
    PartSealed,
    PaymentsCounted,
    Tally,
    due,
    transition,
)
from coordinator.core.settlement.mending import Kept, remade
from coordinator.core.settlement.sending import TransactionState
from hypergpu.ids import JobId, NodeId

ONE, TWO = NodeId("0x" + "11" * 20), NodeId("0x" + "22" * 20)
SEALED = Tally(sealed=1, sent=1)
BEFORE = Epoch(
    job_id=JobId("job-00000000000a"),
    number=4,
    receipts=12,
    nodes=(ONE, TWO),
    is_ended=True,
    batch=Tally(sealed=2, sent=2, mined=1),
    close=SEALED,
    payment=SEALED,
)
RECORDED = Kept(Part.BATCH, TransactionState.FINAL, 10, (ONE,))
PAID = Kept(Part.PAYMENT, TransactionState.MINED)
CLOSED = Kept(Part.CLOSE, TransactionState.FINAL)


def test_an_epoch_that_is_open_on_the_ledger_takes_again_what_was_given_up() -> None:
    left = remade(BEFORE, [RECORDED], is_closed=False)
    assert left == replace(
        BEFORE,
        receipts=10,
        nodes=(ONE,),
        is_ended=False,
        batch=Tally(1, 1, 1, 1),
        close=Tally(),
        payment=Tally(),
    )
    assert left.state is EpochState.OPEN


@pytest.mark.parametrize(("kept", "is_others"), [([], True), ([CLOSED], False)])
def test_one_that_is_closed_there_takes_nothing_more_whoever_closed_it(
    kept: list[Kept], *, is_others: bool
) -> None:
    left = remade(BEFORE, [RECORDED, *kept], is_closed=True)
    assert (left.is_ended, left.is_closed_by_others) == (True, is_others)
    assert left.is_closing


def test_one_that_was_closed_before_anything_was_recorded_is_final() -> None:
    left = remade(BEFORE, [CLOSED, PAID], is_closed=True)
    assert left.state is EpochState.FINAL
    assert not left.is_count_due


def test_whom_payments_passed_over_is_asked_again_unless_all_of_them_stand() -> None:
    counted = replace(BEFORE, counted=1, deferred=2)
    stands = remade(counted, [RECORDED, CLOSED, PAID], is_closed=True)
    assert (stands.counted, stands.deferred) == (1, 2)
    fell = remade(replace(counted, counted=2), [RECORDED, CLOSED, PAID], is_closed=True)
    assert (fell.counted, fell.deferred) == (0, 0)
    assert fell.is_count_due


@pytest.mark.parametrize(("is_swept", "is_counted"), [(False, False), (True, True)])
def test_a_sweep_that_is_given_up_is_due_again_unless_somebody_else_has_swept(
    *, is_swept: bool, is_counted: bool
) -> None:
    swept = replace(BEFORE, counted=1, is_whole=True, sweep=SEALED)
    left = remade(swept, [RECORDED, CLOSED, PAID], is_closed=True, is_swept=is_swept)
    assert (left.is_count_due, left.is_swept_by_others) == (not is_counted, is_swept)
    again = transition(left, PaymentsCounted(deferred=0, window_ends_s=1, is_whole=True))
    wanted = due(again, 9, sweeps=250)
    assert (wanted is None) == is_swept
    assert transition(again, PartSealed(Part.SWEEP)).sweep.sealed == (not is_swept)
