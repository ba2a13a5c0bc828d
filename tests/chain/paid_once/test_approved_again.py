"""What takes tokens is signed again with an approval of its own in front of it."""

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.founding import funded_at
from coordinator.shell.chain.pump import HaltError
from hypergpu.chain import gas
from hypergpu.ids import JobId
from tests.chain.ground import ESCROW, JOB, ORDER, Ground

ONE = replace(ORDER, job_id=JobId("job-00000000000b"), escrow=1_000)
TWO = replace(ORDER, job_id=JobId("job-00000000000c"), escrow=500)
STARTS_MOST = 8
LATER = [TransactionState.WAITING, TransactionState.MINED, TransactionState.FAILED]


def free(ground: Ground, job_id: JobId) -> int:
    job = ground.settler.site.job(job_id)
    return 0 if job is None else job.free


def retried(ground: Ground) -> int:
    """Start as an operator does who has mended a cause, until nothing fails. Returns how often."""
    for starts in range(STARTS_MOST):
        try:
            ground.until(lambda _turn: not left(ground))
        except HaltError:
            ground.retry_failed()
        else:
            ground.options = replace(ground.options, retries_failed=False)
            return starts
    raise AssertionError(f"these fail again and again: {left(ground)}")


def left(ground: Ground) -> list[str]:
    rows = ground.journal.transactions(ground.settler.site.account, states=LATER)
    return [row.transaction.purpose for row in rows]


def approvals(ground: Ground, prefix: str) -> int:
    return len(ground.journal.purposes(ground.settler.site.account, f"approve/{prefix}/"))


def test_an_opening_that_fails_twice_has_an_approval_each_time(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.opened()
    with monkeypatch.context() as scant:
        # Half as much again is still too little.
        scant.setattr(gas, "OPEN_JOB", 100_000)
        ground.turn(ONE)
    # In the same block: its approval sets the allowance anew, and is used up.
    ground.turn(TWO)
    starts = retried(ground)
    assert starts > 1
    assert approvals(ground, f"open/{ONE.job_id}") == starts
    assert (free(ground, ONE.job_id), free(ground, TWO.job_id)) == (1_000, 500)
    assert funded_at(ground.journal, ground.settler.site.account, ONE.job_id, 1_000) is not None


def test_a_deposit_that_failed_is_approved_again_and_made_once(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.opened()
    with monkeypatch.context() as scant:
        scant.setattr(gas, "FUND_JOB", 30_000)
        ground.turn(replace(ORDER, escrow=ESCROW + 70))
    whole = replace(ORDER, escrow=ESCROW + 100)
    ground.turn(whole)
    assert retried(ground)
    assert approvals(ground, f"fund/{JOB}")
    ground.turn(whole)
    ground.rest()
    assert free(ground, JOB) == ESCROW + 100


def test_what_is_signed_again_behind_its_own_approval_needs_no_other(ground: Ground) -> None:
    ground.opened()
    ground.turn(ONE)
    # Before anything of it is sent.
    ground.spend_nonce()
    ground.retry_failed()
    ground.trust_rpc()
    ground.until(lambda _turn: not left(ground))
    assert free(ground, ONE.job_id) == 1_000
    assert approvals(ground, f"open/{ONE.job_id}") == 0
