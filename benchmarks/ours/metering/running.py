"""Payments of one job over a journal in a file, on an Anvil that somebody else runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from benchmarks.ours.metering.host import ENDED, JobPlan, JournalHost
from hypergpu.errors import HyperGPUError
from hypergpu.statements.domain import Terms
from payments.shell.config import PaymentSettings
from payments.shell.plugin import CoordinatorPayments

_LOOK_S = 0.05


class SettlementRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, the same for every start of its process."""

    folder: str
    url: str
    job: JobPlan
    round_ms: int = 0
    """Time between two rounds."""
    metering: Literal["batched", "each"] = "batched"

    @property
    def receipts(self) -> int:
        """Receipts of all nodes."""
        return self.job.nodes * self.job.rounds


class RunningPayments(NamedTuple):
    """Payments that run, with the job in the journal and its escrow on the chain."""

    host: JournalHost
    payments: CoordinatorPayments
    terms: Terms
    first_round: int
    """The first one that the journal does not have."""

    def end(self, plan: SettlementRun) -> None:
        """Journal the job's end, once."""
        last = self.host.rows(plan.job.job_id, plan.job.rounds + 2, 1)
        if not last:
            self.host.append(plan.job.job_id, [ENDED])


@asynccontextmanager
async def run_payments(plan: SettlementRun) -> AsyncIterator[RunningPayments]:
    """Run the payments until the block is left."""
    host = JournalHost(Path(plan.folder))
    settings = PaymentSettings(chain="anvil", chain_url=plan.url, metering=plan.metering)
    payments = CoordinatorPayments(host, settings)
    await payments.start()
    running = asyncio.create_task(payments.run())
    job = plan.job
    try:
        while (terms := _known_terms(payments, job)) is None:
            await _look(running)
        if not host.jobs():
            host.append(job.job_id, job.first_rows(terms))
        payments.wake()
        while not (host.funding.get(job.job_id) or (0,))[0]:
            await _look(running)
        rows = len(host.rows(job.job_id, 0, job.rounds + 2))
        yield RunningPayments(host, payments, terms, rows - len(job.first_rows(terms)))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await payments.stop()


def _known_terms(payments: CoordinatorPayments, job: JobPlan) -> Terms | None:
    try:
        return payments.terms(job.job_id, job.spec.pay)
    except HyperGPUError:
        return None


async def _look(running: "asyncio.Task[None]") -> None:
    """Wait a moment; a task that ended raises its error."""
    if running.done():
        running.result()
        raise RuntimeError("payments ended by themselves")
    await asyncio.sleep(_LOOK_S)
