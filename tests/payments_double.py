"""A payments package that pays on no chain and remembers what the coordinator told it."""

from collections.abc import Mapping

import grpc.aio

from hypergpu.errors import HyperGPUError
from hypergpu.extension import CoordinatorHost, PaymentSummary
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.signature import IdentityKey
from hypergpu.statements.domain import Domain, Terms, terms_of
from hypergpu.statements.receipt import SignedReceipt


class RecordingPayments:
    """`hypergpu.extension.Payments` in memory."""

    def __init__(self, key: IdentityKey, host: CoordinatorHost | None = None) -> None:
        self.host = host
        self.refusal: HyperGPUError | None = None
        """Raised instead of terms."""
        self.wakes = 0
        self.caught_up: list[tuple[JobId, list[str]]] = []
        """Jobs whose rows were asked to be receipted, with the kinds of rows there were."""
        self.greeted: dict[NodeId, Mapping[JobId, SignedReceipt]] = {}
        self._owner = Address(key.node_id)

    def terms(self, job_id: JobId, pay: Pay) -> Terms:
        if self.refusal is not None:
            raise self.refusal
        return terms_of(self._owner, job_id, Domain())

    async def start(self) -> None:
        return

    async def run(self) -> None:
        return

    async def stop(self) -> None:
        return

    def wake(self) -> None:
        self.wakes += 1

    def greet(self, node: NodeId, newest: Mapping[JobId, SignedReceipt]) -> None:
        self.greeted[node] = newest

    async def catch_up(self, job_id: JobId) -> None:
        rows = self.host.rows(job_id, 0, 1_000) if self.host else ()
        self.caught_up.append((job_id, [row.kind for row in rows]))

    def summary(self) -> PaymentSummary | None:
        return None

    def add_services(self, server: grpc.aio.Server) -> None:
        return
