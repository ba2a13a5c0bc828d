"""What the ledger would refuse is not signed: it waits, says what is missing, and goes on then."""

import pytest
from msgspec.structs import replace

from coordinator.shell.chain.founding import JobOrder, funded_at
from hypergpu.ids import JobId
from tests.chain.ground import ESCROW, JOB, ORDER, PROFILE, Ground
from tests.chain.refused.tokens import (
    REFUSES,
    TAKES_A_FEE,
    WrongToken,
    give,
    set_paused,
    take_bond,
)
from tests.signed_receipts import COORDINATOR

OTHER = JobId("job-00000000000c")
SECOND = replace(ORDER, job_id=OTHER, escrow=500)
AGAIN = "; it is tried again with every block"

FEE = (
    "of 500 that the ledger's token was to move only 495 arrived, since it takes a fee."
    " Fix: use a ledger whose token takes none: HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS"
)


def without_play_money(ground: Ground) -> None:
    """Go on as on a chain where nobody makes tokens."""
    contract = ground.settler.contract
    ground.start_with(contract=contract, profile=replace(PROFILE, is_local=False))


def free(ground: Ground, job_id: JobId) -> int:
    job = ground.settler.site.job(job_id)
    return 0 if job is None else job.free


def complaint(ground: Ground, order: JobOrder) -> str:
    """What is said of an order that is not signed."""
    before = ground.journal.next_nonce(ground.settler.site.account)
    result = ground.settler.turn([order])
    assert ground.journal.next_nonce(ground.settler.site.account) == before
    held = result.held[order.job_id]
    assert held.order == order
    (said,) = result.turn.complaints
    assert said == held.complaint
    return said


def goes_on(ground: Ground, job_id: JobId, escrow: int) -> None:
    ground.until(lambda _turn: free(ground, job_id) == escrow)
    ground.rest()
    assert ground.settler.turn([]).held == {}
    assert free(ground, job_id) == escrow


def settles(ground: Ground) -> None:
    """The first job is paid to the last unit, whatever waits."""
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.settle()
    paid = ESCROW - free(ground, JOB)
    assert paid == 4 * 2 * 320 * 9_000 * 1_000 // 10**6


def test_a_raise_without_the_tokens_for_it_waits_for_them(ground: Ground) -> None:
    ground.opened()
    without_play_money(ground)
    said = complaint(ground, replace(ORDER, escrow=ESCROW + 70))
    assert said == (
        f"the escrow of {JOB} cannot be raised to {ESCROW + 70} on the ledger:"
        f" {COORDINATOR.node_id} has 0 of the ledger's token left, and 70 are needed."
        f" Fix: send {COORDINATOR.node_id} 70 more of the ledger's token{AGAIN}"
    )
    settles(ground)
    left = free(ground, JOB)
    give(ground, 70)
    goes_on(ground, JOB, left + 70)
    assert funded_at(ground.journal, ground.settler.site.account, JOB, ESCROW + 70) is not None


def test_a_second_job_without_the_tokens_for_its_escrow_waits_and_the_first_is_paid(
    ground: Ground,
) -> None:
    ground.opened()
    without_play_money(ground)
    give(ground, 499)
    assert complaint(ground, SECOND) == (
        f"{OTHER} cannot be opened on the ledger with an escrow of 500: {COORDINATOR.node_id} has"
        " 499 of the ledger's token left, and 500 are needed."
        f" Fix: send {COORDINATOR.node_id} 1 more of the ledger's token{AGAIN}"
    )
    settles(ground)
    give(ground, 1)
    goes_on(ground, OTHER, 500)


def test_two_orders_of_one_turn_are_not_given_the_same_tokens(ground: Ground) -> None:
    ground.opened()
    without_play_money(ground)
    give(ground, 700)
    third = replace(SECOND, job_id=JobId("job-00000000000d"))
    result = ground.settler.turn([SECOND, third])
    assert list(result.held) == [third.job_id]
    assert "has 200 of the ledger's token left, and 500 are needed" in str(result.turn.complaints)
    give(ground, 300)
    goes_on(ground, third.job_id, 500)
    assert free(ground, OTHER) == 500


def test_an_escrow_that_the_ledger_cannot_hold_stops_no_other_job(ground: Ground) -> None:
    ground.opened()
    said = complaint(ground, replace(SECOND, escrow=2**96 + 5))
    assert f"{2**96 + 5} is more than 96 bits of the ledger hold. Fix: take a smaller" in said
    settles(ground)
    # Whoever takes it back wants less.
    goes_on_with(ground, SECOND)


def goes_on_with(ground: Ground, order: JobOrder) -> None:
    ground.settler.turn([order])
    goes_on(ground, order.job_id, order.escrow)


def test_escrows_of_one_job_that_are_too_large_together_wait(ground: Ground) -> None:
    ground.opened(replace(ORDER, escrow=2**96 - 1))
    said = complaint(ground, replace(ORDER, escrow=2**96 + 9))
    assert "a number went out of its range (panic 0x11). Fix: mend that" in said


def test_a_job_waits_for_its_coordinators_bond(ground: Ground) -> None:
    ground.opened()
    take_bond(ground)
    assert complaint(ground, SECOND) == (
        f"{OTHER} cannot be opened on the ledger with an escrow of 500: the coordinator's bond on"
        " the ledger is 0, and the ledger asks for 1000000. Fix: post 1000000 more: hypergpu ledger"
        f" bond{AGAIN}"
    )
    settles(ground)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (TAKES_A_FEE, FEE),
        (REFUSES, 'a contract refused it: "refused". Fix: mend that'),
    ],
)
def test_what_a_token_does_to_an_escrow_is_told(ground: Ground, how: int, words: str) -> None:
    ground.opened()
    token = WrongToken(ground)
    # It takes its fee of what is minted too.
    give(ground, 5)
    token.wrongs(how, ground.settler.site.contract)
    assert complaint(ground, SECOND) == (
        f"{OTHER} cannot be opened on the ledger with an escrow of 500: {words}{AGAIN}"
    )
    settles(ground)
    token.behaves()
    ground.mine()
    goes_on(ground, OTHER, 500)


def test_a_job_that_comes_while_the_ledger_is_paused_is_opened_behind_the_pause(
    ground: Ground,
) -> None:
    ground.opened()
    set_paused(ground, is_paused=True)
    result = ground.settler.turn([SECOND])
    assert result.held[OTHER].complaint == (
        f"{OTHER} cannot be opened on the ledger with an escrow of 500: the ledger's guardian has"
        " paused it. Fix: what is due is paid in a pause too: wait until the guardian ends it"
        f"{AGAIN}"
    )
    set_paused(ground, is_paused=False)
    goes_on(ground, OTHER, 500)
