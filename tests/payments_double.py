"""Payments packages of tests: they pay on no chain and remember what the coordinator told them."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import CoordinatorHost, PaymentSummary
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger_terms import Domain, Terms, terms_of
from hypergpu.statements import SignedReceipt
from hypergpu.work_units import WorkUnit

FREE_PAY = str(Path(__file__).parent / "plugins")
"""On PYTHONPATH before all else, it gives a coordinator `FundingPayments`."""


class _NoServicer:
    """Serves nothing: each method of PaymentsService is missing its job."""

    def __getattr__(self, name: str) -> object:
        async def reject(*_: object) -> object:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"{name} serves no job here")

        return reject


class RecordingPayments:
    """`hypergpu.extension.PaymentsPlugin` in memory."""

    def __init__(self, host: CoordinatorHost) -> None:
        self.host = host
        self.refusal: HyperGPUError | None = None
        """Raised instead of terms."""
        self.caught_up: list[tuple[JobId, list[str]]] = []
        """Jobs whose rows were to be receipted, with the kinds of rows there were."""
        self.greeted: dict[NodeId, Mapping[JobId, SignedReceipt]] = {}
        self.woken = asyncio.Event()

    def terms(self, job_id: JobId, pay: Pay, unit: WorkUnit = WorkUnit.SAMPLES) -> Terms:
        if self.refusal is not None:
            raise self.refusal
        return terms_of(self.host.key.address, job_id, Domain(), unit)

    async def start(self) -> None:
        return

    async def run(self) -> None:
        return

    async def stop(self) -> None:
        return

    def wake(self) -> None:
        self.woken.set()

    def greet(self, node: NodeId, newest: Mapping[JobId, SignedReceipt]) -> None:
        self.greeted[node] = newest

    async def receipts(
        self, job_id: JobId, wanted: Mapping[NodeId, int]
    ) -> tuple[SignedReceipt, ...]:
        return ()

    async def catch_up(self, job_id: JobId) -> None:
        self.caught_up.append((job_id, [row.kind for row in self.host.rows(job_id, 0, 1_000)]))

    def summary(self) -> PaymentSummary | None:
        return None

    def servicer(self) -> object:
        return _NoServicer()


class FundingPayments(RecordingPayments):
    """Funds every job without end, as soon as it knows of it; forgets all when it is killed."""

    async def run(self) -> None:
        funded_jobs: set[JobId] = set()
        while True:
            self.woken.clear()
            for job_id in self.host.jobs():
                if job_id not in funded_jobs:
                    await self.host.change_funding(job_id, None, "")
                    funded_jobs.add(job_id)
            await self.woken.wait()


def open_funding(host: CoordinatorHost) -> FundingPayments:
    """Entry point of the plugin in `FREE_PAY`."""
    return FundingPayments(host)
