"""What failed is settled once, in its order, whatever went by meanwhile."""

import pytest
from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.founding import funded_at
from coordinator.shell.chain.pump import HaltError
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.typed import word_bytes
from tests.chain.ground import ESCROW, JOB, NODES, ORDER, PROFILE, TURNS_MOST, WAITING, Ground
from tests.signed_receipts import COORDINATOR, node_key

STRANGER = node_key(99)
EACH = 320 * 9_000 * 1_000 // 10**6
"""What a receipt of the ground earns."""
SCANT = replace(PROFILE, gas_percent=40)
"""With it every transaction of an epoch runs out of gas."""


def close_of(ground: Ground, epoch: int) -> bytes:
    site = ground.settler.site
    return site.calls.abi.call("closeEpoch", word_bytes(site.job_key(JOB)), epoch)


def said_until_settled(ground: Ground) -> set[str]:
    """What the settler complains of until nothing is left to be done."""
    said: set[str] = set()
    for _ in range(TURNS_MOST):
        said |= set(ground.turn().complaints)
        ground.let_pass(5)
        ground.mine()
        if not ground.journal.epochs() and not ground.journal.unsealed(1):
            return said
    raise AssertionError(f"not settled: {ground.turn()}, {ground.epochs()}")


def closed_by_others(epoch: int) -> str:
    return f"somebody else has closed epoch {epoch} of {JOB} on the ledger"


def outgrown(ground: Ground) -> None:
    """An epoch with a recorded batch, open for so long that anybody may close it."""
    ground.opened()
    ground.earn(0, range(2))
    ground.rest()
    ground.let_pass(PROFILE.window_s + 1)


@pytest.mark.parametrize("is_over", [False, True])
def test_an_epoch_that_somebody_else_closes_is_gone_on_with_in_the_next(
    ground: Ground, *, is_over: bool
) -> None:
    outgrown(ground)
    ground.act_as(STRANGER, close_of(ground, 0))
    ground.earn(0, range(2, 4))
    ground.until(lambda _turn: ground.epochs()[0].is_closed_by_others)
    # The job is still in that epoch: what it earns there waits, and work goes on.
    ground.earn(0, range(4, 5))
    ground.rest()
    ground.mine()
    ground.turn()
    assert len(ground.journal.unsealed(99)) == 3 * len(NODES)
    (epoch,) = ground.epochs()
    assert (epoch.is_closed_by_others, epoch.receipts) == (True, 2 * len(NODES))
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    # The pool of what was recorded has left the escrow; what waits is owed beside it.
    assert (ESCROW - reading.free, reading.owed) == (2 * len(NODES) * EACH, 3 * len(NODES) * EACH)

    ground.end(0, is_last=is_over)
    if not is_over:
        ground.earn(1, range(5, 6))
        ground.end(1, is_last=True)
    ground.settle()
    assert [(one.number, one.state) for one in ground.epochs()] == [
        (0, EpochState.FINAL),
        (1, EpochState.FINAL),
    ]
    ground.check_exact(5 if is_over else 6)


def test_a_close_that_comes_before_a_batch_and_a_close_in_the_pool_loses_nothing(
    ground: Ground,
) -> None:
    outgrown(ground)
    ground.earn(0, range(2, 3))
    ground.end(0)
    ground.turn()
    assert ground.turn().waiting > 1
    ground.ask("anvil_setBalance", STRANGER.node_id, hex(10**18))
    ground.send_as(STRANGER, close_of(ground, 0))
    ground.mine()
    ground.earn(1, range(3, 4))
    ground.end(1, is_last=True)
    said = said_until_settled(ground)
    assert any(closed_by_others(0) in one for one in said)
    ground.check_exact(4)


def test_an_epoch_that_is_closed_before_its_coordinator_does_is_paid_as_ever(
    ground: Ground,
) -> None:
    outgrown(ground)
    ground.act_as(STRANGER, close_of(ground, 0))
    ground.end(0, is_last=True)
    said_until_settled(ground)
    ground.check_exact(2)


def test_a_close_by_others_is_gone_on_from_after_a_crash_at_any_turn(ground: Ground) -> None:
    outgrown(ground)
    ground.act_as(STRANGER, close_of(ground, 0))
    ground.earn(0, range(2, 3))
    ground.end(0, is_last=True)
    for _ in range(30):
        ground.turn()
        ground.mine()
        ground.crash()
    ground.settle()
    ground.check_exact(3)


def test_a_failure_of_its_own_is_no_close_by_others(ground: Ground) -> None:
    ground.opened()
    failed_behind_its_close(ground)
    with pytest.raises(HaltError, match=r"batch/.*it failed in block"):
        ground.turn()


def sealed_scant(ground: Ground) -> None:
    """A batch that will run out of gas, sent; the close of its epoch, which will not, signed."""
    ground.start_with(profile=SCANT)
    ground.earn(0, range(2))
    ground.turn()
    ground.start_with(profile=PROFILE)
    ground.end(0, is_last=True)
    ground.turn()


def failed_behind_its_close(ground: Ground) -> None:
    """A batch that runs out of gas, in one block with the close of its epoch, which does not."""
    sealed_scant(ground)
    ground.turn()
    ground.mine()


def test_what_a_block_took_behind_a_failed_batch_leaves_that_to_the_next_epoch(
    ground: Ground,
) -> None:
    ground.opened()
    failed_behind_its_close(ground)
    ground.retry_failed()
    ground.settle()
    assert [(one.number, one.receipts) for one in ground.epochs()] == [(0, 0), (1, 2 * len(NODES))]
    ground.check_exact(2)


def failed_alone(ground: Ground) -> None:
    """A batch that runs out of gas, and a close and a payment behind it that nobody has sent."""
    sealed_scant(ground)
    ground.mine()
    with pytest.raises(HaltError, match="Nothing is sent behind it"):
        ground.turn()
    waiting = ground.journal.transactions(ground.settler.site.account, states=WAITING)
    assert [row.transaction.part for row in waiting] == ["close", "payment"]


@pytest.mark.parametrize("crashes", [0, 12])
def test_what_stands_behind_a_failed_batch_does_not_go_before_it(
    ground: Ground, crashes: int
) -> None:
    ground.opened()
    failed_alone(ground)
    ground.retry_failed()
    for _ in range(crashes):
        ground.turn()
        ground.mine()
        ground.crash()
    ground.settle()
    # All of it in its own epoch, whose close came after its batch.
    assert [(one.number, one.receipts) for one in ground.epochs()] == [(0, 2 * len(NODES))]
    ground.check_exact(2)
    given_up = ground.journal.transactions(
        ground.settler.site.account, states=[TransactionState.ABANDONED]
    )
    assert [row.transaction.part for row in given_up] == ["batch", "close", "payment"]


def test_an_escrow_whose_nonce_somebody_else_used_is_signed_again_in_its_order(
    ground: Ground,
) -> None:
    ground.opened()
    ground.turn(replace(ORDER, escrow=2 * ESCROW))
    ground.spend_nonce()
    ground.trust_rpc()
    with pytest.raises(HaltError, match=r"mint/escrow/.*was used by a transaction that"):
        ground.turn()
    ground.retry_failed()
    ground.trust_rpc()
    ground.until(
        lambda _turn: (
            funded_at(ground.journal, ground.settler.site.account, JOB, 2 * ESCROW) is not None
        )
    )
    job = ground.settler.site.job(JOB)
    assert job is not None
    assert job.free == 2 * ESCROW


def test_nonces_that_somebody_else_has_spent_are_left_out_once_they_are_deep(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    ground.rest()
    for _ in range(3):
        ground.spend_nonce()
    ground.retry_failed()
    with pytest.raises(HyperGPUError, match=r"has seen \d+ transactions") as caught:
        ground.turn()
    assert caught.value.reason is Reason.LEDGER_AHEAD
    ground.mine(PROFILE.depth)
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(3)


def test_nonces_that_are_left_out_stay_so_at_later_starts(ground: Ground) -> None:
    ground.opened()
    ground.send_as(COORDINATOR)
    ground.mine(1 + PROFILE.depth)
    ground.retry_failed()
    # Nothing else is signed in that start.
    ground.turn()
    ground.start_with(retries_failed=False)
    ground.rest()
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(1)


def test_nonces_are_left_out_behind_what_failed(ground: Ground) -> None:
    ground.opened()
    failed_alone(ground)
    for _ in range(5):
        ground.spend_nonce()
    ground.mine(PROFILE.depth)
    ground.retry_failed()
    ground.trust_rpc()
    ground.settle()
    ground.check_exact(2)


def test_a_batch_that_the_ledger_has_and_the_journal_has_not_is_never_signed_again(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    site = ground.settler.site
    root, nodes = bytes(32), ()
    call = site.calls.abi.call("submitAggregate", word_bytes(site.job_key(JOB)), 0, 0, root, nodes)
    ground.act_as(COORDINATOR, call)
    ground.mine(PROFILE.depth)
    ground.retry_failed()
    with pytest.raises(HyperGPUError, match="the ledger expects batch 1 of") as caught:
        ground.until(lambda _turn: False)
    assert caught.value.reason is Reason.LEDGER_AHEAD
    assert ground.journal.batches(JOB) == ()
