"""Boundary between the coordinator and the optional package that pays for work.

The coordinator loads the entry point ``payments`` of the group ``hypergpu.coordinator``. Without
that package training works, work is signed for no chain, and no receipts are made. This file holds
protocols and values only: neither side imports the other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from hypergpu.crypto import IdentityKey
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.work_units import WorkUnit

if TYPE_CHECKING:
    from hypergpu.ledger_terms import Terms
    from hypergpu.statements import SignedReceipt

ENTRY_POINT_GROUP = "hypergpu.coordinator"
ENTRY_POINT_NAME = "payments"
USER_METHODS = frozenset({"GetLedger", "ListReceipts"})
"""Methods of PaymentsService that any user may call."""


class JournalRow(NamedTuple):
    """One durable event of a job, as the journal holds it."""

    sequence: int
    """Position within the job's journal, from 0."""
    kind: str
    """Class name of the event."""
    body: bytes
    """JSON of the event."""


class PaymentSummary(msgspec.Struct, frozen=True):
    """Ledger that pays the coordinator's jobs, for the start line and the state page."""

    chain_id: int
    rpc_url: str
    """Address of the chain's RPC endpoint without credentials."""
    ledger: Address
    notes: tuple[str, ...] = ()
    """Sentences for the operator, each on one line."""


class CoordinatorHost(Protocol):
    """The part of a coordinator that the payments package may use."""

    @property
    def data_dir(self) -> Path:
        """Folder of the coordinator's data; exists."""
        ...

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the database; empty: SQLite files in ``data_dir``."""
        ...

    @property
    def key(self) -> IdentityKey:
        """The coordinator's signing key."""
        ...

    def fence(self, connection: Any) -> None:
        """Refuse a transaction on the database unless this coordinator drives until its end.

        Args:
            connection: SQLAlchemy's, in the transaction.

        Raises:
            HyperGPUError: NOT_READY, another coordinator drives.
        """
        ...

    def check_driving(self) -> None:
        """Refuse to act once another coordinator may drive; asks nobody.

        Raises:
            HyperGPUError: NOT_READY.
        """
        ...

    def jobs(self) -> tuple[JobId, ...]:
        """All jobs, live and ended, in order of creation."""
        ...

    def rows(self, job_id: JobId, from_sequence: int, limit: int) -> Sequence[JournalRow]:
        """Durable rows of a job's journal from a sequence on, oldest first.

        Blocks on the database; safe on any thread.
        """
        ...

    def node_name(self, node: NodeId) -> str:
        """Name that the node's owner gave it; empty before it has dialled in since the start."""
        ...

    def send_receipts(
        self, node: NodeId, job_id: JobId, receipts: Sequence["SignedReceipt"]
    ) -> bool:
        """Send receipts to a connected node. Call on the event loop.

        Returns:
            False where the node is not connected or its queue is full: nothing was sent.
        """
        ...

    async def change_funding(self, job_id: JobId, funded_samples: int | None, reason: str) -> str:
        """Journal how many samples of a job its escrow covers.

        Args:
            job_id: A job of this coordinator.
            funded_samples: Accepted samples covered at full quality, counted from the job's
                beginning; None: no limit is known.
            reason: Shown to users while the job waits for funds.

        Returns:
            Why the job rejected it, for example because it has ended; empty on success.
        """
        ...


class LedgerCaller(Protocol):
    """Who calls PaymentsService, which `CoordinatorHost` has admitted."""

    @property
    def own_nodes(self) -> "frozenset[NodeId] | None":
        """Nodes whose accounts it may read; None: all."""
        ...


class PaymentsPlugin(Protocol):
    """A payments package, opened for one coordinator."""

    def terms(self, job_id: JobId, pay: Pay, unit: WorkUnit = WorkUnit.SAMPLES) -> "Terms":
        """Terms under which the work of a new job is signed.

        Args:
            job_id: The job.
            pay: Its price.
            unit: What its work is counted in.

        Raises:
            HyperGPUError: The job pays, and no ledger is configured.
        """
        ...

    async def start(self) -> None:
        """Open the database and check the chain, before the coordinator serves.

        The journal may be read; `CoordinatorHost.change_funding` waits for events that are
        processed only once this has returned.

        Raises:
            HyperGPUError: The configuration cannot work, with the fix.
        """
        ...

    async def run(self) -> None:
        """Make receipts and settle them until cancelled. Called again after an error."""
        ...

    async def stop(self) -> None:
        """Close what `start` opened; `run` is no longer running."""
        ...

    def wake(self) -> None:
        """Note that new rows are durable. Cheap and idempotent; call on the event loop."""
        ...

    def greet(self, node: NodeId, newest: Mapping[JobId, "SignedReceipt"]) -> None:
        """Note that a node connected, with the newest receipt it shows of each job.

        Args:
            node: The node that dialled in, authenticated.
            newest: Unverified receipts off the wire.
        """
        ...

    async def catch_up(self, job_id: JobId) -> None:
        """Make the receipts of all durable rows of an ended job, which is about to be removed."""
        ...

    async def receipts(
        self, job_id: JobId, wanted: Mapping[NodeId, int]
    ) -> "Sequence[SignedReceipt]":
        """Receipts that follow from a durable ``RoundMeasured``, made now where they are not yet.

        Args:
            job_id: A job of this coordinator.
            wanted: Nodes, each with the round of its work.

        Returns:
            In the order of ``wanted``, without work that has no receipt.
        """
        ...

    def summary(self) -> PaymentSummary | None:
        """The ledger in use; None where no chain is configured."""
        ...

    def servicer(self) -> object:
        """Object that serves PaymentsService on the user port, asked for once `start` returned.

        It has ``async def get_ledger(request, caller)`` for the method GetLedger, and so on; one
        that streams is an async generator, and each may raise `HyperGPUError`. The coordinator
        authorises calls like those of `JobService`: it takes a user's token for `USER_METHODS`, a
        node's for jobs in which its nodes had a part, an operator's for all others.
        """
        ...


class OpenPayments(Protocol):
    """Signature of the object behind the entry point."""

    def __call__(self, host: CoordinatorHost) -> PaymentsPlugin | None:
        """Open payments for a coordinator; None where the configuration turns them off."""
        ...
