import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import (
    Due,
    Epoch,
    EpochEnded,
    EpochEvent,
    EpochState,
    Move,
    Part,
    PartMoved,
    PartSealed,
    PaymentsCounted,
    due,
    refusal,
    transition,
)
from coordinator.core.settlement.sealing import Metering, SealingRule, Waiting, seal_reason
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Milliseconds

JOB = JobId("job-00000000000a")
ONE, TWO = NodeId("0x" + "11" * 20), NodeId("0x" + "22" * 20)
OPEN = Epoch(job_id=JOB, number=4)
BATCH = PartSealed(Part.BATCH, 10, (TWO, ONE))


def after(*events: EpochEvent, epoch: Epoch = OPEN) -> Epoch:
    for event in events:
        assert refusal(epoch, event) == ""
        epoch = transition(epoch, event)
    return epoch


def moved(move: Move, *parts: Part) -> list[EpochEvent]:
    return [PartMoved(part, move) for part in parts]


ALL = (Part.BATCH, Part.CLOSE, Part.PAYMENT)
SEALED = after(BATCH, EpochEnded(), PartSealed(Part.CLOSE), PartSealed(Part.PAYMENT))
SENT = after(*moved(Move.SENT, *ALL), epoch=SEALED)
MINED = after(*moved(Move.MINED, *ALL), epoch=SENT)
COUNTED = after(PaymentsCounted(0, 500, is_whole=True), epoch=MINED)
DEFERRED = after(PaymentsCounted(1, 500, is_whole=True), epoch=MINED)
ALL_FINAL = after(*moved(Move.FINISHED, *ALL), epoch=COUNTED)
CHECKED = after(PaymentsCounted(0, 500, is_whole=True, is_deep=True), epoch=ALL_FINAL)
CLOSED_BY_OTHERS = replace(
    after(BATCH, *moved(Move.SENT, Part.BATCH), *moved(Move.MINED, Part.BATCH)),
    is_ended=True,
    is_closed_by_others=True,
)


@pytest.mark.parametrize(
    ("epoch", "state"),
    [
        (OPEN, EpochState.OPEN),
        (after(BATCH, EpochEnded()), EpochState.OPEN),
        (SEALED, EpochState.SEALED),
        (SENT, EpochState.PUBLISHED),
        (after(*moved(Move.MINED, Part.BATCH), epoch=SENT), EpochState.PUBLISHED),
        (after(*moved(Move.MINED, Part.BATCH, Part.CLOSE), epoch=SENT), EpochState.CONFIRMED),
        (MINED, EpochState.CONFIRMED),
        (DEFERRED, EpochState.CONFIRMED),
        (COUNTED, EpochState.PAID),
        (ALL_FINAL, EpochState.PAID),
        (CHECKED, EpochState.FINAL),
        (after(PaymentsCounted(1, 500, True, True), epoch=ALL_FINAL), EpochState.CONFIRMED),
        (after(EpochEnded()), EpochState.FINAL),
        (CLOSED_BY_OTHERS, EpochState.OPEN),
        (after(PartSealed(Part.PAYMENT), epoch=CLOSED_BY_OTHERS), EpochState.SEALED),
    ],
)
def test_the_state_follows_from_what_was_counted(epoch: Epoch, state: EpochState) -> None:
    assert epoch.state is state


def test_a_block_that_stays_is_asked_once_all_of_an_epoch_is_final() -> None:
    assert [one.is_check_due for one in (MINED, COUNTED, ALL_FINAL, CHECKED)] == [
        False,
        False,
        True,
        False,
    ]
    passed_over = after(PaymentsCounted(1, 500, is_whole=True, is_deep=True), epoch=ALL_FINAL)
    assert not passed_over.is_check_due
    assert due(passed_over, 500, sweeps=0) == Due(
        Part.PAYMENT, f"the window of epoch 4 of {JOB} is over for 1 node"
    )
    # Asked again of the newest block, nobody was: that does not yet make it final.
    recounted = after(PaymentsCounted(0, 500, is_whole=True), epoch=passed_over)
    assert recounted.is_check_due


def test_a_reorganisation_of_what_was_final_has_the_block_that_stays_asked_again() -> None:
    undone = after(PartMoved(Part.PAYMENT, Move.UNDONE), epoch=CHECKED)
    assert undone.state is EpochState.CONFIRMED
    back = after(
        PartMoved(Part.PAYMENT, Move.MINED),
        PaymentsCounted(0, 500, is_whole=True),
        PartMoved(Part.PAYMENT, Move.FINISHED),
        epoch=undone,
    )
    assert (back.state, back.is_check_due) == (EpochState.PAID, True)


def test_a_reorganisation_takes_the_state_back_and_the_count_with_it() -> None:
    gone = after(*moved(Move.MISSING, *ALL), epoch=COUNTED)
    assert gone.state is EpochState.PUBLISHED
    back = after(*moved(Move.MINED, *ALL), epoch=gone)
    assert back.state is EpochState.CONFIRMED
    assert back.is_count_due


def test_one_that_reaches_deeper_than_final_is_taken_back_too() -> None:
    final = after(*moved(Move.FINISHED, *ALL), epoch=COUNTED)
    assert after(*moved(Move.UNDONE, *ALL), epoch=final).state is EpochState.PUBLISHED


def test_its_nodes_are_those_of_its_batches_in_order() -> None:
    assert after(BATCH, PartSealed(Part.BATCH, 1, (ONE,))).nodes == (ONE, TWO)


@pytest.mark.parametrize(
    ("epoch", "event", "why"),
    [
        (SEALED, BATCH, "epoch 4 of job-00000000000a has ended and takes no more receipts"),
        (OPEN, PartSealed(Part.CLOSE), "has not ended"),
        (SEALED, PartSealed(Part.CLOSE), "is closed once"),
        (after(BATCH, EpochEnded()), PartSealed(Part.PAYMENT), "is paid after its close"),
        (SEALED, EpochEnded(), "has ended already"),
        (CLOSED_BY_OTHERS, BATCH, "takes no more receipts"),
        (CLOSED_BY_OTHERS, PartSealed(Part.CLOSE), "is closed once"),
        (SEALED, PartMoved(Part.CLOSE, Move.MINED), "none can be mined"),
        (SENT, PartMoved(Part.CLOSE, Move.SENT), "none can be sent"),
        (SENT, PaymentsCounted(0, 0, is_whole=True), "has no payments to count"),
    ],
)
def test_what_is_not_legal_changes_nothing(epoch: Epoch, event: EpochEvent, why: str) -> None:
    assert why in refusal(epoch, event)
    assert transition(epoch, event) == epoch


@pytest.mark.parametrize(
    ("epoch", "time_s", "part"),
    [
        (OPEN, 0, None),
        (after(EpochEnded()), 0, None),
        (after(BATCH, EpochEnded()), 0, Part.CLOSE),
        (after(BATCH, EpochEnded(), PartSealed(Part.CLOSE)), 0, Part.PAYMENT),
        (SEALED, 0, None),
        (MINED, 0, None),
        (DEFERRED, 499, None),
        (DEFERRED, 500, Part.PAYMENT),
        (COUNTED, 0, Part.SWEEP),
        (after(PartSealed(Part.SWEEP), epoch=COUNTED), 0, None),
        (after(PaymentsCounted(0, 500, is_whole=False), epoch=MINED), 0, None),
        (CLOSED_BY_OTHERS, 0, Part.PAYMENT),
    ],
)
def test_what_is_sealed_next(epoch: Epoch, time_s: int, part: Part | None) -> None:
    wanted = due(epoch, time_s, sweeps=250)
    assert (wanted and wanted.part) is part
    assert wanted is None or wanted.reason


def test_dust_is_left_where_it_is_not_worth_a_transaction() -> None:
    assert due(COUNTED, 0, sweeps=1) is None


RULE = SealingRule(metering=Metering.BATCHED, interval_ms=1_000, receipts_max=100, in_flight_max=4)
EACH = SealingRule(metering=Metering.EACH, in_flight_max=4)


def waiting(receipts: int, age_ms: int) -> Waiting:
    return Waiting(receipts=receipts, oldest_age_ms=Milliseconds(age_ms), is_ended=False)


AT_THE_END = Waiting(receipts=5, oldest_age_ms=Milliseconds(10), is_ended=True)


@pytest.mark.parametrize(
    ("what", "in_flight", "rule", "says"),
    [
        (waiting(0, 9_999), 0, RULE, ""),
        (waiting(5, 10), 0, RULE, ""),
        (waiting(100, 10), 0, RULE, "100 fill a batch"),
        (waiting(5, 1_000), 0, RULE, "has waited for 1000 ms"),
        (AT_THE_END, 0, RULE, "the epoch has ended"),
        (AT_THE_END, 4, RULE, ""),
        (waiting(1, 0), 0, EACH, "a transaction of its own"),
        (waiting(1, 0), 4, EACH, ""),
    ],
)
def test_when_receipts_are_sealed(
    what: Waiting, in_flight: int, rule: SealingRule, says: str
) -> None:
    reason = seal_reason(what, in_flight, rule)
    assert says in reason
    assert bool(reason) == bool(says)
