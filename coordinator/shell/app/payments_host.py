"""The coordinator as the payments package sees it, and how that package is found."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from sqlalchemy.engine import Connection

from coordinator.config import Settings
from coordinator.core.work.work_events import FundingChanged
from coordinator.shell.driver.driver import Driver
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import (
    ENTRY_POINT_GROUP,
    ENTRY_POINT_NAME,
    CoordinatorHost,
    JournalRow,
    OpenPayments,
    PaymentsPlugin,
)
from hypergpu.ids import JobId, NodeId
from hypergpu.statements import SignedReceipt
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2, receipt_pb2
from hypergpu.wire.messages import receipt_message, terms_message

_RECEIPTS_IN_A_MESSAGE = 100
"""About 50 KB."""


class PaymentsHost:
    """`hypergpu.extension.CoordinatorHost` over this coordinator's journal, driver and nodes."""

    def __init__(
        self, settings: Settings, key: IdentityKey, driver: Driver, nodes: ConnectedNodes
    ) -> None:
        self._settings = settings
        self._key = key
        self._driver = driver
        self._nodes = nodes

    @property
    def data_dir(self) -> Path:
        return self._settings.data_dir

    @property
    def database_url(self) -> str:
        return self._settings.database_url

    @property
    def key(self) -> IdentityKey:
        return self._key

    def fence(self, connection: Connection) -> None:
        self._driver.journal.database.fence(connection)

    def check_driving(self) -> None:
        self._driver.journal.database.check_driving()

    def jobs(self) -> tuple[JobId, ...]:
        kinds, runtimes = self._driver.kinds, self._driver.runtimes
        return tuple(
            job_id for job_id, runtime in runtimes.items() if kinds.of_job(runtime.job).core.paid_by
        )

    def rows(self, job_id: JobId, from_sequence: int, limit: int) -> Sequence[JournalRow]:
        entries = self._driver.journal.read(job_id, from_sequence, limit=limit).entries
        return [JournalRow(entry.sequence, entry.kind, entry.body_json) for entry in entries]

    def node_name(self, node: NodeId) -> str:
        return self._nodes.name_of(node)

    def send_receipts(self, node: NodeId, job_id: JobId, receipts: Sequence[SignedReceipt]) -> bool:
        session = self._nodes.streams.get(node)
        if session is None or session.is_crowded:
            return False
        runtime = self._driver.runtimes.get(job_id)
        for start in range(0, len(receipts), _RECEIPTS_IN_A_MESSAGE):
            piece = receipts[start : start + _RECEIPTS_IN_A_MESSAGE]
            message = receipt_pb2.Receipts(
                job_id=job_id,
                receipts=[receipt_message(signed_receipt) for signed_receipt in piece],
            )
            if runtime is not None and job_id not in session.informed_of_terms:
                session.informed_of_terms.add(job_id)
                message.terms.CopyFrom(terms_message(runtime.job.terms, epoch=0))
            session.send(node_pb2.ControlResponse(receipts=message))
        return True

    async def change_funding(self, job_id: JobId, funded_samples: int | None, reason: str) -> str:
        event = FundingChanged(at_ms=Milliseconds(0), funded_units=funded_samples, reason=reason)
        return await self._driver.insist(job_id, event)


def load_payments(host: CoordinatorHost, name: str = ENTRY_POINT_NAME) -> PaymentsPlugin | None:
    """Open the payments package of a name; None where none is installed.

    Raises:
        HyperGPUError: MACHINE_UNFIT, the package needs another one that is not installed; or what
            the package says of its own settings.
    """
    installed_points = entry_points(group=ENTRY_POINT_GROUP, name=name)
    for entry_point in installed_points:
        try:
            open_payments: OpenPayments = entry_point.load()
            return open_payments(host)
        except ModuleNotFoundError as error:
            detail = f"paying for work needs the package {error.name}"
            fix = "install the extra: pip install 'hypergpu[chain]'; or set HYPERGPU_CHAIN=none"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix) from error
    return None
