import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import Epoch, EpochState, Part, Tally
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
