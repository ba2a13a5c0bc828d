"""The coordinator's entry point: receipts for every job, and settlement where a chain is named.

Training waits for none of it. A chain that is away is asked again; only errors that cannot heal (a
wrong chain, no Anvil, a contract that is no ledger) end the start.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import CoordinatorHost, PaymentSummary
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger_terms import Domain, Terms, terms_of
from hypergpu.statements import SignedReceipt
from hypergpu.work_units import WorkUnit
from payments.shell.chains import NONE, ChainError, NamedChain, PaymentSettings
from payments.shell.projection import Projection
from payments.shell.service import PaymentsServicer
from payments.shell.store import PaymentStore

if TYPE_CHECKING:
    # They need web3, of the extra [chain].
    from payments.shell.anvil import KeptAnvil
    from payments.shell.connection import ChainConnection

log = structlog.get_logger()

_ANVIL_FOLDER = "chain"
_AWAY_REST_S = 1.0
_WRONG_REST_S = 10.0
_FOLD_REST_S = 0.2
"""Least time between two folds: shorter rounds share one, which costs as much for all of them."""


def open_payments(host: CoordinatorHost) -> "CoordinatorPayments":
    """The plugin of a coordinator, by the settings in its environment.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, a setting is wrong.
    """
    try:
        return CoordinatorPayments(host, PaymentSettings())
    except ValidationError as wrong:
        (first, *_) = wrong.errors()
        name = f"HYPERGPU_COORDINATOR_{'_'.join(map(str, first['loc'])).upper()}"
        detail = f"{name}={first['input']}: {first['msg']}"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail) from None


class CoordinatorPayments:
    """`hypergpu.extension.PaymentsPlugin`."""

    def __init__(self, host: CoordinatorHost, settings: PaymentSettings) -> None:
        self._host = host
        self._settings = settings
        self._has_rows = asyncio.Event()
        self._has_receipts = asyncio.Event()
        self._greetings: list[tuple[NodeId, Mapping[JobId, SignedReceipt]]] = []
        self._connection: ChainConnection | None = None
        self._anvil: KeptAnvil | None = None
        self._is_in_doubt = False
        """Whether a commit failed, and settlement has not started over since."""

    def terms(self, job_id: JobId, pay: Pay, unit: WorkUnit = WorkUnit.SAMPLES) -> Terms:
        """See `hypergpu.extension.PaymentsPlugin`."""
        domain = Domain() if self._connection is None else self._connection.domain
        if pay.unit_price and not domain.chain_id:
            raise HyperGPUError(
                Reason.CHAIN_UNREACHABLE,
                "a job that pays is signed for its ledger, and none is known"
                + (f": {self._connection.complaint}" if self._connection else ""),
                fix="start the coordinator with a chain, HYPERGPU_CHAIN=CHAIN, and submit again",
            )
        domain = domain if pay.unit_price else Domain()
        return terms_of(self._host.key.address, job_id, domain, unit)

    async def start(self) -> None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        host = self._host
        self._store = await asyncio.to_thread(
            PaymentStore, host.database_url, host.data_dir, host.fence
        )
        self._projection = await asyncio.to_thread(Projection, host, self._store)
        if self._settings.chain != NONE:
            self._connection = await self._connect()

    async def run(self) -> None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._project())
            if self._connection is not None:
                tasks.create_task(self._settle(self._connection))
            if self._anvil is not None:
                tasks.create_task(self._anvil.run())

    async def stop(self) -> None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        if self._connection is not None:
            await self._connection.close()
        if self._anvil is not None:
            await self._anvil.stop()
        await asyncio.to_thread(self._store.close)

    def wake(self) -> None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        self._has_rows.set()

    async def catch_up(self, job_id: JobId) -> None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        await self._projection.advance_job(job_id)

    async def receipts(
        self, job_id: JobId, wanted: Mapping[NodeId, int]
    ) -> Sequence[SignedReceipt]:
        """See `hypergpu.extension.PaymentsPlugin`."""
        if await self._projection.advance_job(job_id):
            self._has_receipts.set()
        return await asyncio.to_thread(self._projection.receipts, job_id, wanted)

    def greet(self, node: NodeId, newest: Mapping[JobId, SignedReceipt]) -> None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        self._greetings.append((node, newest))
        self._has_rows.set()

    def summary(self) -> PaymentSummary | None:
        """See `hypergpu.extension.PaymentsPlugin`."""
        connection = self._connection
        if connection is None:
            return None
        notes = (*connection.notes, *([connection.complaint] if connection.complaint else ()))
        return PaymentSummary(
            connection.profile.chain_id, connection.chain.where, connection.addresses.ledger, notes
        )

    def servicer(self) -> PaymentsServicer:
        """See `hypergpu.extension.PaymentsPlugin`."""
        return PaymentsServicer(self._projection, self._store, self._connection)

    async def _connect(self) -> "ChainConnection":
        try:
            from payments.shell import anvil, connection
        except ModuleNotFoundError as error:
            raise HyperGPUError(
                Reason.MACHINE_UNFIT,
                f"settling on a chain needs {error.name}, which is not installed",
                fix="install the extra: pip install 'hypergpu[chain]'; or run with"
                " HYPERGPU_CHAIN=none",
            ) from None
        stated_chain = await connection.find_chain(self._settings, self._store)
        if not stated_chain.url:
            folder = self._host.data_dir / _ANVIL_FOLDER
            self._anvil = anvil.KeptAnvil(folder, self._settings.chain_port)
            self._anvil.start()
            stated_chain = NamedChain(stated_chain.profile, self._anvil.url)
        new_connection = connection.ChainConnection(
            self._host, self._projection, self._store, self._settings, stated_chain
        )
        try:
            await new_connection.make_ready()
        except ChainError as away:
            new_connection.complaint = str(away)
            log.warning("the chain is waited for", reason=str(away))
        except BaseException:
            await new_connection.close()
            raise
        return new_connection

    async def _project(self) -> None:
        while True:
            self._has_rows.clear()
            greetings, self._greetings = self._greetings, []
            try:
                if await self._projection.advance():
                    self._has_receipts.set()
                for node, newest in greetings:
                    await self._projection.greet(node, newest)
            except SQLAlchemyError:
                log.exception("receipts are made later: the payments' database failed")
                self._greetings += greetings
                self._has_rows.set()
                await asyncio.sleep(_WRONG_REST_S)
                await self._start_over()
            await asyncio.sleep(_FOLD_REST_S)
            await self._has_rows.wait()

    async def _start_over(self) -> None:
        """Believe the database again, not what was in memory when it failed."""
        self._is_in_doubt = True
        with suppress(SQLAlchemyError):
            await self._projection.start_over()

    async def _settle(self, connection: "ChainConnection") -> None:
        while True:
            has_receipts = self._has_receipts.is_set()
            self._has_receipts.clear()
            complaint, rest_s = await self._tick(connection, has_receipts=has_receipts)
            if not complaint:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await self._has_receipts.wait()
                continue
            if connection.complaint != complaint:
                log.warning("nothing is settled now", reason=complaint)
            connection.complaint = complaint
            if has_receipts:
                self._has_receipts.set()  # What was new is looked at again.
            await asyncio.sleep(rest_s)

    async def _tick(
        self, connection: "ChainConnection", *, has_receipts: bool
    ) -> tuple[str, float]:
        """Look and act once. Why nothing is settled now, and the seconds until the next try."""
        if self._is_in_doubt:
            self._is_in_doubt = False
            connection.start_over()
        try:
            self._host.check_driving()
            await connection.tick(has_receipts=has_receipts)
        except ChainError as away:
            return str(away), _AWAY_REST_S
        except HyperGPUError as wrong:
            # The chain was away when the coordinator started, and is another one now.
            return wrong.message, _WRONG_REST_S
        except SQLAlchemyError as error:
            connection.start_over()
            return str(error), _WRONG_REST_S
        return "", connection.poll_s
