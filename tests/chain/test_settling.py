from collections.abc import Collection

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.sealing import Metering, SealingRule
from coordinator.shell.chain.pump import HaltError
from coordinator.shell.journal.ledger.records import UnsealedReceipt
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.ids import JobId
from tests.chain.ground import ESCROW, JOB, NODES, ORDER, Ground


def test_receipts_become_money_in_the_nodes_wallets(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(3))
    ground.end(0)
    ground.earn(1, range(3, 5))
    ground.end(1, is_last=True)
    ground.settle()
    assert [epoch.state for epoch in ground.epochs()] == [EpochState.FINAL] * 2
    ground.check_exact(5)


@pytest.mark.parametrize("metering", [Metering.EACH, Metering.PACKED])
def test_however_receipts_are_metered_the_money_is_the_same(
    ground: Ground, metering: Metering
) -> None:
    ground.options = replace(ground.options, rule=replace(ground.options.rule, metering=metering))
    ground.opened()
    ground.earn(0, range(3))
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(3)
    expected = 3 * len(NODES) if metering is Metering.EACH else 1
    assert len(ground.journal.batches(JOB)) == expected


def test_receipts_wait_for_others_until_they_fill_a_batch_or_their_epoch_ends(
    ground: Ground,
) -> None:
    patient = SealingRule(interval_ms=10**9, receipts_max=3 * len(NODES))
    ground.options = replace(ground.options, rule=patient)
    ground.opened()
    ground.earn(0, range(2))
    ground.rest()
    assert ground.journal.batches(JOB) == ()
    ground.earn(0, range(2, 3))
    ground.rest()
    assert len(ground.journal.batches(JOB)) == 1
    ground.earn(0, range(3, 4))
    ground.rest()
    assert len(ground.journal.batches(JOB)) == 1
    ground.end(0)
    ground.rest()
    assert len(ground.journal.batches(JOB)) == 2
    ground.earn(1, range(4, 5))
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(5)


def test_a_receipt_waits_no_longer_than_the_interval(ground: Ground) -> None:
    hasty = SealingRule(interval_ms=1, receipts_max=10**6)
    ground.options = replace(ground.options, rule=hasty)
    ground.opened()
    ground.earn(0, range(2))
    ground.until(lambda _turn: len(ground.journal.batches(JOB)) == 1)
    ground.earn(0, range(2, 3))
    ground.until(lambda _turn: len(ground.journal.batches(JOB)) == 2)
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(3)


def test_a_nodes_unpaid_share_waits_for_its_window_and_says_so(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0)
    ground.rest()
    (epoch,) = ground.epochs()
    assert epoch.state is EpochState.CONFIRMED
    assert epoch.deferred == len(NODES)
    assert epoch.window_ends_s > ground.chain.head().time_s


@pytest.mark.parametrize("metering", Metering)
@pytest.mark.parametrize("is_sealed_between", [False, True])
def test_a_round_that_was_measured_after_rounds_of_the_next_epoch_is_settled_all_the_same(
    ground: Ground, metering: Metering, *, is_sealed_between: bool
) -> None:
    ground.options = replace(ground.options, rule=replace(ground.options.rule, metering=metering))
    ground.opened()
    ground.earn(0, [0])
    ground.earn(1, [1])
    if is_sealed_between:
        ground.rest()
    ground.earn(0, [2])
    ground.end(0)
    ground.earn(1, [3])
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(4)


class StaleJournal(SqlJournal):
    """Tells for ever which receipts waited when it first told of any."""

    told: tuple[UnsealedReceipt, ...] = ()

    def unsealed(
        self, limit: int, *, without: Collection[JobId] = ()
    ) -> tuple[UnsealedReceipt, ...]:
        self.told = self.told or super().unsealed(limit, without=without)
        return self.told


def test_what_does_not_follow_on_what_was_sealed_stops_settling_loudly(ground: Ground) -> None:
    ground.opened()
    ground.crash()
    ground.journal.close()
    ground.journal = StaleJournal(str(ground.folder / "journal.sqlite3"))
    ground.earn(0, [0])
    ground.rest()
    ground.earn(0, [1])
    with pytest.raises(HaltError, match=r"receipts 0 to 0 .* not the next to be sealed") as halted:
        ground.turn()
    assert halted.value.fix.startswith("keep the data folder")


@pytest.mark.parametrize("is_over", [False, True])
def test_receipts_of_an_epoch_that_was_paid_are_settled_with_the_next(
    ground: Ground, *, is_over: bool
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=is_over)
    ground.settle()
    ground.earn(0, range(2, 3))
    if not is_over:
        ground.earn(1, range(3, 4))
        ground.end(1, is_last=True)
    ground.settle()
    assert [epoch.number for epoch in ground.epochs()] == [0, 1]
    ground.check_exact(3 if is_over else 4)


def test_an_epoch_without_receipts_costs_nothing(ground: Ground) -> None:
    ground.opened()
    ground.end(0)
    turn = ground.turn()
    (epoch,) = ground.epochs()
    assert epoch.state is EpochState.FINAL
    assert turn.waiting == 0


def test_a_job_that_is_not_open_keeps_its_receipts(ground: Ground) -> None:
    ground.earn(0, range(2))
    ground.turn()
    ground.rest()
    assert len(ground.journal.unsealed(99)) == 2 * len(NODES)
    ground.opened()
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)


def test_the_escrow_is_read_and_raised(ground: Ground) -> None:
    ground.opened(replace(ORDER, escrow=5_000))
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert (reading.free, reading.owed, reading.left) == (5_000, 0, 5_000)

    ground.earn(0, range(1))
    ground.turn()
    ground.mine()
    ground.turn()
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert reading.owed == 4 * 320 * 9_000 * 1_000 // 10**6 // 1
    assert reading.left == 0

    ground.turn(replace(ORDER, escrow=ESCROW))
    ground.turn(replace(ORDER, escrow=ESCROW))
    ground.rest()
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert reading.free == ESCROW
