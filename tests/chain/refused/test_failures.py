"""What a block refuses all the same: it is told why, and stops only what depends on it."""

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pump import HaltError
from hypergpu.chain import gas
from hypergpu.ids import JobId
from tests.chain.ground import JOB, ORDER, Ground
from tests.chain.refused.tokens import REFUSES, WrongToken, set_paused

OTHER = JobId("job-00000000000c")
SECOND = replace(ORDER, job_id=OTHER, escrow=500)
PAUSED = "the ledger's guardian has paused it: nothing more is recorded or paid until"


def free(ground: Ground, job_id: JobId) -> int:
    job = ground.settler.site.job(job_id)
    return 0 if job is None else job.free


def said_in(ground: Ground, turns: int) -> str:
    said: list[str] = []
    for _ in range(turns):
        said += ground.turn().complaints
        ground.mine()
    return "; ".join(said)


def test_a_paused_ledger_is_waited_for(ground: Ground) -> None:
    ground.opened()
    set_paused(ground, is_paused=True)
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    assert PAUSED in said_in(ground, 4)
    assert ground.journal.batches(JOB) == ()
    set_paused(ground, is_paused=False)
    ground.settle()
    ground.check_exact(2)


@pytest.mark.parametrize("crashes", [False, True])
def test_a_batch_that_a_pause_met_on_its_way_goes_again_behind_it(
    ground: Ground, *, crashes: bool
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.turn()
    ground.turn()
    set_paused(ground, is_paused=True)
    said = said_in(ground, 1)
    assert f"batch/{JOB}/0 was refused, since the ledger's guardian has paused it" in said
    for _ in range(12):
        ground.turn()
        ground.mine()
        if crashes:
            ground.crash()
    assert ground.turn().complaints[0].startswith(PAUSED)
    assert ground.turn().waiting == 0
    set_paused(ground, is_paused=False)
    ground.settle()
    ground.check_exact(2)


def test_an_opening_that_its_token_refuses_in_a_block_is_left_aside_until_it_does_not(
    ground: Ground,
) -> None:
    ground.opened()
    token = WrongToken(ground)
    ground.turn(SECOND)
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.turn()
    token.wrongs(REFUSES, ground.settler.site.contract)
    said = said_in(ground, 2)
    assert f"{OTHER} is left aside, since open/{OTHER} was refused: a contract refused it" in said
    ground.settle()
    ground.check_exact(2)
    assert f"{OTHER} cannot be opened on the ledger with an escrow of 500" in said_in(ground, 1)
    token.behaves()
    ground.mine()
    ground.until(lambda _turn: free(ground, OTHER) == 500)
    ground.rest()
    # Made once, for one deposit.
    assert free(ground, OTHER) == 500
    assert ground.settler.turn([]).held == {}


def test_an_opening_that_is_refused_again_is_not_signed_again_by_a_start_that_retries(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.opened()
    with monkeypatch.context() as scant:
        scant.setattr(gas, "OPEN_JOB", 60_000)
        ground.turn(SECOND)
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.turn()
    ground.mine()
    with pytest.raises(HaltError, match=r"It failed since it ran out of gas: it used \d+ of 60000"):
        ground.turn()
    token = WrongToken(ground)
    token.wrongs(REFUSES, ground.settler.site.contract)
    ground.retry_failed()
    ground.settle()
    ground.check_exact(2)
    given_up = ground.journal.transactions(
        ground.settler.site.account, states=[TransactionState.ABANDONED]
    )
    assert f"open/{OTHER}" in [row.transaction.purpose for row in given_up]
    assert free(ground, OTHER) == 0
    # It is ordered at every start.
    token.behaves()
    ground.mine()
    ground.turn(SECOND)
    ground.rest()
    assert free(ground, OTHER) == 500
