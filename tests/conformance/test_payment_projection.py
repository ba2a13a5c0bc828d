"""A job's fold stays whole where a commit's answer is lost, and where its caller goes away."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from benchmarks.ours.metering.host import COORDINATOR, ENDED, JobPlan, JournalHost
from hypergpu.ids import JobId
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.statements import SignedReceipt
from payments.shell.projection import Projection
from payments.shell.store import JobRecord, PaymentStore

PLAN = JobPlan(nodes=2, rounds_per_epoch=2)
JOB = PLAN.job_id
TERMS = terms_of(COORDINATOR.address, JOB, Domain())
ROUNDS = 3


class ImperfectStore(PaymentStore):
    """Loses the answer of a commit, or takes long for one, when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__("", folder)
        self.loses_answer = False
        self.is_slow = False
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.has_ended = threading.Event()

    def keep_job(
        self, job_id: JobId, record: JobRecord, receipts: Sequence[SignedReceipt] = ()
    ) -> None:
        is_slow, self.is_slow = self.is_slow, False
        if is_slow:
            self.has_begun.set()
            self.may_go_on.wait()
        super().keep_job(job_id, record, receipts)
        if is_slow:
            self.has_ended.set()
        if self.loses_answer:
            self.loses_answer = False
            raise OperationalError("COMMIT", {}, Exception("the server closed the connection"))


@pytest.fixture
def host(tmp_path: Path) -> JournalHost:
    host = JournalHost(tmp_path)
    host.append(JOB, PLAN.first_rows(TERMS))
    return host


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImperfectStore]:
    imperfect_store = ImperfectStore(tmp_path)
    yield imperfect_store
    imperfect_store.close()


def work(host: JournalHost, first: int = 0) -> None:
    """Journal rounds, and the job's end."""
    host.append(JOB, [PLAN.round_row(number, TERMS) for number in range(first, ROUNDS)])
    host.append(JOB, [ENDED])


def check_whole(projection: Projection, host: JournalHost) -> None:
    """Every round gave every node one receipt, and the node has it."""
    state = projection.states[JOB]
    assert state.is_over
    assert [tally.count for tally in state.nodes.values()] == [ROUNDS] * PLAN.nodes
    for key in PLAN.keys:
        rounds = [signed_receipt.receipt.round for signed_receipt in host.received[key.node_id]]
        assert rounds == list(range(ROUNDS))


async def test_a_commit_whose_answer_was_lost_is_found_again(
    host: JournalHost, store: ImperfectStore
) -> None:
    projection = Projection(host, store)
    await projection.advance()
    host.append(JOB, [PLAN.round_row(0, TERMS)])
    store.loses_answer = True
    with pytest.raises(OperationalError):
        await projection.advance()
    work(host, first=1)
    await projection.start_over()
    await projection.advance()
    check_whole(projection, host)


async def test_a_caller_that_goes_away_leaves_no_fold_behind_another(
    host: JournalHost, store: ImperfectStore
) -> None:
    projection = Projection(host, store)
    store.is_slow = True
    first_call = asyncio.create_task(projection.advance_job(JOB))
    await asyncio.to_thread(store.has_begun.wait)
    work(host)
    first_call.cancel()
    other = asyncio.create_task(projection.advance_job(JOB))
    # The other one comes to where it waits, or to its end.
    for _ in range(100):
        await asyncio.to_thread(int)
    store.may_go_on.set()
    await other
    with pytest.raises(asyncio.CancelledError):
        await first_call
    await asyncio.to_thread(store.has_ended.wait)
    await projection.advance_job(JOB)
    check_whole(projection, host)
