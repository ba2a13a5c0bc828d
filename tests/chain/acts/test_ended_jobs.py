"""A job whose end is announced: what it has earned is recorded in time, and nothing else waits."""

import pytest
from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.reading.ending import Ending
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd
from coordinator.shell.metering.settling import Settling
from msgspec.structs import replace
from tests.scenarios.test_metering import PAID, training

from coordinator.config import Settings
from coordinator.core.job import Phase
from hypergpu.chain.moments import moment
from hypergpu.chain.sent.acts import ActFile
from hypergpu.errors import Reason
from hypergpu.ids import JobId
from tests.chain.acts.hands import EACH, WINDOW_S, Hands, refused, told
from tests.chain.ground import JOB, NODES, ORDER, PROFILE, WITHIN_S, Ground
from tests.chain.test_long_faults import turned
from tests.signed_receipts import COORDINATOR, Work, receipt_record

OTHER = replace(ORDER, job_id=JobId("job-00000000000b"))


@pytest.fixture
def ending(ground: Ground, hands: Hands) -> Ending:
    """One receipt of each node is recorded, and the end of the job is announced after that."""
    ground.ask("evm_setAutomine", False)
    ground.start_with(acts=ActFile(hands.data, PROFILE.chain_id))
    ground.turn(OTHER)
    ground.earn(0, [0])
    ground.rest()
    ground.crash()
    ground.ask("evm_setAutomine", True)
    said = told(hands.as_operator("reclaim", JOB, "--yes", "--json"))
    ground.ask("evm_setAutomine", False)
    ground.rest()
    ends_at_s = said["ready_at_s"]
    return Ending(JOB, ends_at_s - WINDOW_S, ends_at_s)


def pass_to(ground: Ground, at_s: int) -> None:
    """Make a block of a time."""
    ground.ask("evm_setNextBlockTimestamp", at_s)
    ground.mine()


def pass_blocks(ground: Ground) -> None:
    """Take turns for as many blocks as giving up a transaction may take."""
    for _ in range(3 * PROFILE.depth):
        ground.turn()
        ground.mine()


def settle_other(ground: Ground) -> None:
    """Earn in the other job, and see that paid."""
    domain = ground.settler.site.domain
    work = Work(node=NODES[0], sequence=0, epoch=0)
    receipt = receipt_record(OTHER.job_id, work, domain=domain)
    ends = (EpochEnd(OTHER.job_id, 0, is_last=True),)
    ground.journal.append([], (), Earnings((receipt,), ends))
    for _ in range(3):
        ground.rest()
        ground.let_pass(WINDOW_S + 1)
        ground.mine()
    states = [one.state for one in ground.epochs() if one.job_id == OTHER.job_id]
    assert states == [EpochState.FINAL]


def check_paid(ground: Ground, receipts_each: int) -> None:
    """Every node has had what was recorded, whatever its job owed beyond."""
    for node in NODES:
        account = ground.account(node.node_id)
        assert (account.counted, account.paid) == (receipts_each, receipts_each * EACH)


def batches(ground: Ground) -> int:
    """How many batches of the job were ever signed."""
    return len(ground.settler.site.purposes(f"batch/{JOB}/"))


def test_what_was_earned_before_is_recorded_in_the_time_left_and_paid_though_the_job_stays(
    ground: Ground, ending: Ending
) -> None:
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert (reading.ending, reading.is_over) == (ending, False)
    ground.earn(0, [1])
    ground.rest()
    # The job is paused, and never leaves its epoch.
    pass_to(ground, ending.recorded_until_s)
    ground.rest()
    pass_to(ground, ending.ends_at_s + WINDOW_S)
    ground.rest()
    check_paid(ground, 2)
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert reading.is_over
    assert ground.turn().complaints == ()


def test_a_coordinator_that_starts_again_begins_no_round_and_pauses_an_open_one_at_the_end(
    hands: Hands, ground: Ground, ending: Ending
) -> None:
    ground.crash()
    settings = Settings(data_dir=hands.data, chain="anvil", chain_url=ground.url)
    settling = Settling(settings, COORDINATOR, ground.journal)
    settling.start(least_s=WITHIN_S)
    job = replace(training(PAID), job_id=JOB)
    waits = replace(job, phase=Phase.WAITING, round=None)
    says = settling.says(job)
    assert says is not None
    assert (says.ending, says.closed) == (ending.announced, "")
    assert settling.unpaid(waits) == ending.announced
    assert settling.unpaid(job) == ""
    # Nobody has ordered the job again: it is known of all the same.
    pass_to(ground, ending.recorded_until_s)
    while not (why := settling.unpaid(job)):
        turned(lambda: settling.state, settling.wake)
    settling.stop()
    assert why == ending.over
    brief, full = settling.ending(JOB)
    assert brief == f"recorded on the ledger until {moment(ending.recorded_until_s)}"
    assert full == ending.over


def test_what_comes_too_late_is_never_signed_and_told_as_its_own_jobs(
    ground: Ground, ending: Ending
) -> None:
    pass_to(ground, ending.recorded_until_s)
    ground.rest()
    signed = batches(ground)
    ground.earn(0, [1])
    ground.earn(1, [2])
    ground.mine()
    ground.rest()
    late = 2 * len(NODES)
    (said,) = ground.turn().complaints
    assert said == ending.unrecorded(late, late * EACH)
    assert f"before {moment(ending.recorded_until_s)}, when it ended on the ledger" in said
    ground.crash()
    ground.turn()
    ground.mine()
    assert ground.turn().complaints == (said,)
    ground.end(1, is_last=True)
    settle_other(ground)
    check_paid(ground, 1)
    assert batches(ground) == signed
    pass_to(ground, ending.ends_at_s + 10 * WINDOW_S)
    assert ground.turn().complaints == ()


@pytest.mark.parametrize("retries", [False, True])
def test_a_batch_that_failed_as_its_job_had_ended_is_given_up_and_no_other_job_waits(
    ground: Ground, ending: Ending, *, retries: bool
) -> None:
    ground.earn(0, [1])
    ground.turn()
    ground.turn()
    signed = batches(ground)
    pass_to(ground, ending.recorded_until_s)
    ground.ask("evm_mine")
    if retries:
        ground.retry_failed()
    else:
        told_at_once = "; ".join(ground.turn().complaints)
        assert f"with {len(NODES)} receipts was refused, since {JOB} has ended" in told_at_once
        ground.crash()
    pass_blocks(ground)
    late = len(NODES)
    assert ground.turn().complaints == (ending.unrecorded(late, late * EACH),)
    settle_other(ground)
    check_paid(ground, 1)
    assert batches(ground) == signed
    account = ground.settler.site.account
    given_up = ground.journal.transactions(account, states=[TransactionState.ABANDONED])
    assert [row.transaction.part for row in given_up] == ["batch"]


def test_what_a_node_has_forced_in_before_the_end_is_not_told_as_lost(
    ground: Ground, ending: Ending
) -> None:
    pass_to(ground, ending.recorded_until_s - 2)
    ground.crash()
    ground.turn()
    ground.earn(0, [1])
    ground.force_in(1)
    pass_to(ground, ending.recorded_until_s)
    ground.rest()
    late = len(NODES) - 1
    assert ground.turn().complaints == (ending.unrecorded(late, late * EACH),)


def test_a_node_of_a_job_that_has_ended_is_not_told_to_wait_for_more_escrow(
    hands: Hands, ground: Ground, ending: Ending
) -> None:
    ground.crash()
    ground.ask("evm_setAutomine", True)
    pass_to(ground, ending.ends_at_s)
    told(hands.as_operator("reclaim", JOB, "--json"))
    hands.vouch(2 * EACH)
    said = refused(hands.as_node("claim"), Reason.ESCROW_SHORT)
    assert said.endswith(
        ". The job ended on"
        f" {moment(ending.recorded_until_s)}, and nothing comes into its escrow any more but what"
        " others give back\n"
    )
