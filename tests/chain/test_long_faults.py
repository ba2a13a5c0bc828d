"""What lasts: a chain away for an hour, an escrow that is not there yet, a key used elsewhere."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from coordinator.core.settlement.patience import MOST_MS
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pipeline import Pipeline, PipelineState
from coordinator.shell.chain.pump import HaltError
from coordinator.shell.metering.settling import Settling
from msgspec.structs import replace
from tests.scenarios.test_metering import FREE, PAID, training, with_both

from coordinator.config import Settings
from coordinator.core.job import BlobRef, Job, LedgerSays, Model, Phase
from coordinator.shell.journal.memory import MemoryJournal
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import Signer
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger.typed import address_bytes
from hypergpu.signature import IdentityKey
from hypergpu.units import Bytes, Wei
from tests.chain.ground import JOB, NODES, TURNS_MOST, WITHIN_S, Ground
from tests.signed_receipts import COORDINATOR

AN_HOUR_S = 3_600
_TRIES_AN_EPOCH = 60
DEAR = hex(10**13)
"""A base fee above what the chain's profile pays at most."""
CHEAP = hex(10**9)


def turned(of: Callable[[], PipelineState], wake: Callable[[], None]) -> PipelineState:
    """What a pipeline says after its next turn, whether that comes off or not."""
    before = of()
    wake()
    while (now := of()) is before:
        assert not now.halted
    assert not now.halted, now.halted
    return now


def test_a_chain_that_is_away_for_an_hour_only_delays(ground: Ground) -> None:
    ground.anvil.options = replace(ground.anvil.options, state_file=ground.folder / "state.json")
    ground.anvil.stop()
    ground.anvil.start()
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    ground.turn()
    ground.crash()
    ground.anvil.stop()
    pipeline = Pipeline(
        lambda: HttpRpc(HttpTransport(ground.url, timeout_s=WITHIN_S)),
        Signer(COORDINATOR),
        ground.journal,
        ground.options,
    )
    pipeline.start()
    epochs = earned_for_an_hour(ground, pipeline)
    ground.anvil.start()
    ground.let_pass(AN_HOUR_S)
    ground.mine()
    state = settled_by(ground, pipeline)
    pipeline.stop()
    assert (state.failures, state.complaint) == (0, "")
    assert ground.journal.unsealed(1) == ()
    ground.check_exact(2 + epochs)


def earned_for_an_hour(ground: Ground, pipeline: Pipeline) -> int:
    """Go on with the job while nobody answers. Gives how many epochs it went through.

    The pipeline rests for a quarter of a minute after each try; here it is woken from that.
    """
    tries = AN_HOUR_S * 1_000 // MOST_MS
    for number in range(1, tries + 1):
        state = turned(lambda: pipeline.state, pipeline.wake)
        assert state.failures >= number
        assert "nobody listens there" in state.complaint
        if number % _TRIES_AN_EPOCH == 0:
            epoch = number // _TRIES_AN_EPOCH
            ground.earn(epoch, range(epoch + 1, epoch + 2))
            ground.end(epoch, is_last=number == tries)
    return tries // _TRIES_AN_EPOCH


def settled_by(ground: Ground, pipeline: Pipeline) -> PipelineState:
    """Make blocks, two seconds apart, until every epoch is final."""
    for _ in range(TURNS_MOST):
        ground.let_pass(2)
        ground.mine()
        state = turned(lambda: pipeline.state, pipeline.wake)
        if not ground.journal.epochs():
            return state
    raise AssertionError(f"not settled: {pipeline.state}, {ground.epochs()}")


def settling_on(ground: Ground, key: IdentityKey, journal: MemoryJournal) -> Settling:
    settings = Settings(data_dir=ground.folder / "new", chain="anvil", chain_url=ground.url)
    settling = Settling(settings, key, journal)
    settling.start(least_s=WITHIN_S)
    return settling


def test_an_escrow_that_is_not_on_the_ledger_is_told_until_it_is_there(ground: Ground) -> None:
    settling = settling_on(ground, IdentityKey.generate(), MemoryJournal())

    def look(job: Job, base_fee: str) -> str:
        """What is said of the job a block later."""
        settling.order(job)
        ground.ask("anvil_setNextBlockBaseFeePerGas", base_fee)
        ground.mine()
        turned(lambda: settling.state, settling.wake)
        turned(lambda: settling.state, settling.wake)
        return settling.unpaid(job)

    small = replace(PAID, pay=replace(PAID.pay, escrow=100))
    model = Model(0, BlobRef(digest_of(b"model"), Bytes(8)))
    job = replace(training(PAID), spec=small, model=model)
    short = ""
    for _ in range(TURNS_MOST):
        if short := look(job, CHEAP):
            break
    assert short == (
        f"the escrow of {job.job_id} has 100 left on the ledger (block {settling.state.height}),"
        " 60 less than the round may cost; raise it for all rounds that are left with as many"
        f" nodes, hypergpu job set pay.escrow=480, and hypergpu job resume {job.job_id}"
    )
    paused = replace(job, phase=Phase.PAUSED)
    assert settling.says(paused) == LedgerSays(Wei(100), settling.state.height)
    assert look(paused, CHEAP) == ""

    # Its user raises it; gas is dearer than the coordinator may pay, so it comes late.
    raised = replace(job, spec=PAID, phase=Phase.PAUSED)
    assert look(raised, DEAR) == ""
    resumed = replace(raised, phase=Phase.TRAINING)
    assert [look(resumed, DEAR) for _ in range(2)] == ["", ""]
    assert "has 100 left" in look(resumed, DEAR)
    for _ in range(TURNS_MOST):
        if not (short := look(resumed, CHEAP)):
            break
    assert short == ""
    settling.stop()


def test_a_coordinator_that_starts_without_its_bond_is_told_before_a_job_is_refused(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others use the same key in other processes.
    monkeypatch.setenv("HOME", str(ground.folder))
    ground.opened()
    settings = Settings(
        data_dir=ground.folder / "new",
        chain="anvil",
        chain_url=ground.url,
        ledger_contract=ground.settler.contract,
    )
    notes = []
    for key, journal in (
        (IdentityKey.generate(), MemoryJournal()),
        (COORDINATOR, ground.journal),
    ):
        ground.crash()
        settling = Settling(settings, key, journal)
        settling.start(least_s=WITHIN_S)
        notes.append(settling.state.note)
        settling.stop()
    assert notes[0].startswith("the coordinator's bond on the ledger is 0, and no job that pays")
    assert "hypergpu ledger bond" in notes[0]
    assert notes[1] == ""


@dataclass
class Room:
    job: Job


def until_opened(ground: Ground, settling: Settling, journal: MemoryJournal, job_id: JobId) -> None:
    """Go on until a block has opened a job."""
    for _ in range(TURNS_MOST):
        ground.mine()
        turned(lambda: settling.state, settling.wake)
        opening = journal.transaction_for(settling.account, f"open/{job_id}")
        if opening is not None and opening.state is not TransactionState.WAITING:
            return
    raise AssertionError(f"not opened: {settling.state}")


async def first_told(settling: Settling, jobs: Sequence[Job]) -> tuple[JobId, str]:
    """Of the first job that is reported, in the order in which they are looked at."""
    told: list[tuple[JobId, str]] = []
    done = asyncio.Event()

    async def short(job_id: JobId, why: str) -> None:
        told.append((job_id, why))
        done.set()

    watching = asyncio.create_task(settling.watch({one.job_id: Room(one) for one in jobs}, short))
    await done.wait()
    watching.cancel()
    return told[0]


def test_a_job_that_settling_stopped_before_it_was_open_is_told_and_no_other(
    ground: Ground,
) -> None:
    model = Model(0, BlobRef(digest_of(b"model"), Bytes(8)))
    opened = replace(training(PAID), model=model)
    unopened = replace(opened, job_id=JobId("job-0000000000ff"))
    key, journal = IdentityKey.generate(), MemoryJournal()
    settling = settling_on(ground, key, journal)
    settling.order(opened)
    until_opened(ground, settling, journal, opened.job_id)
    assert settling.unpaid(unopened) == ""
    settling.stop()

    for _ in range(3):
        ground.send_as(key)
        ground.mine()
    settling = settling_on(ground, key, journal)
    job_id, why = asyncio.run(first_told(settling, [opened, unopened]))
    settling.stop()
    assert job_id == unopened.job_id
    assert why == (
        f"{job_id} is not open on the ledger, and settling has stopped: {settling.state.halted}"
    )
    assert "settling has stopped: chain 31337 has seen" in why
    # The next round's decision is given the same.
    says = [settling.says(one) for one in (opened, unopened, replace(unopened, spec=FREE))]
    assert says == [LedgerSays(), LedgerSays(closed=why), None]
    with pytest.raises(HyperGPUError, match="while nothing is settled: chain 31337 has") as refused:
        settling.domain_for(PAID.pay)
    assert refused.value.reason is Reason.SENDING_HALTED
    assert "hypergpu up --retry-failed" in refused.value.fix
    assert settling.domain_for(Pay()).chain_id == 31337
    assert settling.unpaid(replace(unopened, phase=Phase.PAUSED)) == ""
    assert settling.unpaid(replace(unopened, round=None)) == ""


def test_what_a_job_earns_between_two_blocks_is_off_what_the_ledger_has_left(
    ground: Ground,
) -> None:
    key, journal = IdentityKey.generate(), MemoryJournal()
    settling = settling_on(ground, key, journal)
    model = Model(0, BlobRef(digest_of(b"model"), Bytes(8)))
    job = replace(training(PAID), model=model)
    settling.order(job)
    until_opened(ground, settling, journal, job.job_id)
    turned(lambda: settling.state, settling.wake)
    said = [settling.says(one) for one in (job, with_both(job))]
    settling.stop()
    # A round of 160 is in and not measured yet.
    assert [one and one.left for one in said] == [480, 320]


def test_what_is_owed_is_not_taken_off_twice_when_a_block_comes_meanwhile(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0)
    ground.mine()
    ground.turn()
    head = ground.turn().head
    before = ground.escrow.reading(JOB)
    ground.mine()
    # The newest block has closed the epoch, which nobody here has noted yet.
    ground.escrow.look(ground.settler.site, head)
    assert before is not None
    assert before.owed > 0
    assert ground.escrow.reading(JOB) == before._replace(height=head.number)
    ground.turn()
    after = ground.escrow.reading(JOB)
    assert after is not None
    assert (after.left, after.owed) == (before.left, 0)


def nobody_was_paid(ground: Ground) -> bool:
    return all(
        ground.account(node.node_id).paid == ground.wallet(address_bytes(node.node_id)) == 0
        for node in NODES
    )


FOREIGN = r"batch/job-00000000000a/0, .*: nonce \d+ was used by a transaction that this coordinator"


def test_a_nonce_that_somebody_else_used_first_stops_everything_behind_it(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    nonce = ground.chain.next_nonce(Signer(COORDINATOR).address)
    ground.spend_nonce()
    for _ in range(3):
        ground.turn()
        ground.mine()
    # The batch's nonce is gone. To close and to pay without it would settle nothing for good.
    assert ground.chain.next_nonce(Signer(COORDINATOR).address) == nonce + 1
    assert ground.ask("txpool_status") == {"pending": "0x0", "queued": "0x0"}
    ground.trust_rpc()
    with pytest.raises(HaltError, match=FOREIGN):
        ground.turn()
    ground.crash()
    ground.trust_rpc()
    with pytest.raises(HaltError, match="Nothing is sent behind it"):
        ground.turn()
    assert nobody_was_paid(ground)
    assert len(ground.journal.receipts(JOB)) == 2 * len(NODES)
    ground.retry_failed()
    ground.trust_rpc()
    ground.settle()
    ground.check_exact(2)


def test_a_nonce_that_somebody_else_takes_in_the_pool_pays_nobody_twice(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.turn()
    ground.turn()
    ground.spend_nonce()
    ground.trust_rpc()
    with pytest.raises(HaltError, match=FOREIGN):
        ground.turn()
    assert nobody_was_paid(ground)
    ground.retry_failed()
    ground.trust_rpc()
    ground.settle()
    ground.check_exact(2)


def test_what_came_too_late_for_its_epoch_waits_until_the_job_has_begun_the_next(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(3))
    ground.force_in(0)
    ground.end(0)
    ground.rest()
    (left,) = {one.node for one in ground.journal.unsealed(99)}
    assert left == NODES[0].node_id
    ground.earn(1, range(3, 4))
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(4)
