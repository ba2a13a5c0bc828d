"""One coordinator from start to end: wires the services, serves, leaves in good order, and says why
it cannot start or go on, with the fix.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import structlog

from coordinator.config import Settings
from coordinator.shell.app.assembly import (
    job_servicer,
    node_servicer,
    open_fleet,
    open_resources,
    open_storage,
    serving_servicer,
    waiting_reasons,
)
from coordinator.shell.app.listeners import HealthServicer, Listeners, Servicers
from coordinator.shell.app.monitoring import open_metrics
from coordinator.shell.app.payments_host import PaymentsHost, load_payments
from coordinator.shell.app.periodic_work import (
    keep_health,
    keep_node_counts,
    keep_others_known,
    store_health,
    store_node_counts,
    store_speeds,
)
from coordinator.shell.app.ports import check_hosts, dialled_hosts, joined_address
from coordinator.shell.app.takeover import end_turn, is_away, take_turn
from coordinator.shell.driver.decisions import Decision
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.kinds import KindTable
from coordinator.shell.driver.replay import replay_jobs
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.needed_blobs import needed_blobs
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.nodes.fleet_speeds import NODES_MOST
from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.outbox.opening import open_outbox
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import ProbeTokens
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.gateways import GatewayCertifier
from coordinator.shell.service.greeting import Greeter
from coordinator.shell.service.job_terms import NewJobTerms
from coordinator.shell.service.node_session import Enrolment
from coordinator.shell.service.operator import OperatorServicer
from coordinator.shell.service.sent_updates import SentUpdates
from coordinator.shell.store.blob_collector import BlobCollector, copy_leftovers
from coordinator.shell.store.bulk.messages import Certificates
from coordinator.shell.store.journal.file_lock import FileLock
from coordinator.shell.store.journal.journal import Journal
from hypergpu.clock import unix_s
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentsPlugin, PaymentSummary
from hypergpu.ids import Address, Digest
from hypergpu.privacy import require_private_folder
from hypergpu.units import Milliseconds
from hypergpu.wire.authority import is_loopback
from hypergpu.wire.credentials import Role, Token, parse_token, token_text

log = structlog.get_logger()

_THREADS = 16
_PAYMENTS_RETRY_S = 10.0
OPERATOR_TOKEN = "operator.token"
EVENTS = "hypergpu.events"
"""Whether events are sent now, for health checks."""
_NO_AUTHORITY = Digest("")


class Ready(msgspec.Struct, frozen=True):
    """The one line on standard output, once calls are served."""

    address: str
    """Where this machine dials."""
    addresses: tuple[str, ...]
    """What tokens name."""
    node_port: int
    bulk_port: int
    """0: an object store carries bulk bytes."""
    operator_token_file: str
    authority: str
    """BLAKE3 of the CA's certificate; empty without TLS."""
    process_id: int
    metrics_port: int
    """0: no metrics are served."""
    chain: PaymentSummary | None = None
    """Ledger that pays jobs; None: no chain is configured."""


class CoordinatorApp:
    """The process as a whole."""

    def __init__(self, settings: Settings, kinds: KindTable = KINDS) -> None:
        """Open everything on disk and replay the journal. Blocks.

        Args:
            settings: Of this process.
            kinds: Kinds of work that it drives.

        Raises:
            HyperGPUError: plaintext is asked for beyond loopback, a host to advertise is none, or
                the folder cannot be made, or others can change it.
            JournalError: another coordinator runs here, or the journal cannot be read.
        """
        _check_settings(settings)
        self._settings = settings
        FileLock(settings.data_dir / "journal")  # To the process's end, wherever that lies.
        turn = take_turn(settings)
        _tell_findings(turn.journal)
        self._others = turn.others
        self._driver = driver = Driver(turn.journal, kinds)
        self._fleet = open_fleet(settings, driver)
        self._storage = open_storage(settings, turn, driver, self._fleet.readings)
        payments = load_payments(PaymentsHost(settings, turn.key, driver, self._fleet.nodes))
        self._job_terms = NewJobTerms(Address(turn.key.node_id), payments)
        self._resources = open_resources(settings, driver, self._storage, self._fleet)
        self._echo = ProbeEcho(ProbeTokens(), self._fleet.nodes.streams.__contains__)
        self._authority = _open_authority(settings)
        self._digest = self._authority.digest if self._authority else _NO_AUTHORITY
        turn.keep_secrets()
        if (tenure := driver.journal.database.tenure) is not None:
            tenure.tell(partial(end_turn, settings))
        self._tokens = IssuedTokens(driver.journal)
        self._nodes = KnownNodes(driver.journal)
        self._guesses = GuessLimiter()
        driver.take_replay(replay_jobs(driver.journal, kinds))
        failpoint("recover.replayed")
        self._needs = needed_blobs(driver)
        self._collector = BlobCollector(self._storage, self._needs)
        self._health = HealthServicer()
        self._outbox = open_outbox(
            settings, driver, payments, partial(self._health.set_part, EVENTS)
        )
        self._listeners = Listeners(settings, self._authority)
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Anything that breaks the driver ends the process too."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        hosts = dialled_hosts(self._settings)
        await self._bind(hosts)
        self._catch_signals()
        # Before anything else runs: an error here ends the start with its own words.
        payments = self._job_terms.payments
        if payments is not None:
            await payments.start()
        async with asyncio.TaskGroup() as tasks:

            def begin(work: Coroutine[object, object, object]) -> asyncio.Task[object]:
                task = tasks.create_task(work)
                task.add_done_callback(self._check_turn)
                return task

            driver_task = begin(
                self._driver.run(self._resources.performing.perform, self._after_drain)
            )
            forever = [
                begin(self._fleet.allocator.run()),
                begin(self._fleet.allocator.watch(Milliseconds(self._settings.lost_after_ms))),
                begin(self._collector.run()),
                begin(keep_node_counts(self._driver, self._fleet.nodes)),
                begin(keep_health(self._driver, self._fleet)),
                begin(keep_others_known(self._others)),
                begin(copy_leftovers(self._storage, self._needs)),
                begin(self._storage.bulk.run()),
            ]
            forever += [
                begin(self._resources.performing.take_up(runtime))
                for runtime in list(self._driver.runtimes.values())
            ]
            if payments is not None:
                forever.append(begin(_run_payments(payments)))
            if self._outbox is not None:
                forever.append(begin(self._outbox.run()))
            await self._serve(hosts)
            await self._is_stopping.wait()
            await self._leave()
            for task in forever:
                task.cancel()
            self._driver.close()
            await driver_task
        await self._metrics.close()
        await self._close()

    async def _bind(self, hosts: tuple[str, ...]) -> None:
        """Take every port, and answer on the one for metrics."""
        settings = self._settings
        self._listeners.bind(hosts, unix_s())
        node_port = self._fleet.readings.node_port = self._listeners.node_port
        await self._echo.open(settings.listen, node_port)
        certificates = self._bulk_certificates(hosts)
        await self._storage.bulk.bind(settings.listen, settings.bulk_port, certificates)
        judges = (self._tokens, self._guesses)
        subjects = (self._driver, self._fleet)
        self._metrics = await open_metrics(settings, subjects, judges, certificates)

    def _check_turn(self, ended: asyncio.Task[object]) -> None:
        """End this process at once where its turn is over: no call of it is to be ended in order,
        nor anything that hangs to be waited for, while another coordinator could drive.
        """
        if ended.cancelled() or (exception := ended.exception()) is None:
            return
        if self._settings.takeover and is_away(exception):
            end_turn(self._settings, str(exception))

    def _bulk_certificates(self, hosts: tuple[str, ...]) -> Certificates | None:
        if self._authority is None:
            return None
        identity = self._authority.server_identity(hosts, unix_s())
        return Certificates(identity.chain_pem, identity.private_key_pem, self._authority.pem)

    async def _serve(self, hosts: tuple[str, ...]) -> None:
        addresses = tuple(joined_address(host, self._listeners.port) for host in hosts)
        gate = NodeGate(self._nodes, is_plaintext=self._settings.plaintext, tokens=self._tokens)
        enrolment = Enrolment(
            authority=self._authority, tokens=self._tokens, nodes=self._nodes, guesses=self._guesses
        )
        enrolment.node_port = self._listeners.node_port
        enrolment.bulk_port = self._storage.bulk.port
        enrolment.others = self._others
        operator = OperatorServicer(
            driver=self._driver,
            fleet=self._fleet,
            tokens=self._tokens,
            known=self._nodes,
            others=self._others,
            reasons=waiting_reasons(self._resources),
            authority=self._digest,
            addresses=addresses,
        )
        certifier = operator.gateways = GatewayCertifier(
            self._authority, enrolment.ports, lost_after_ms=self._settings.lost_after_ms
        )
        greeter = Greeter(
            self._settings, self._fleet.nodes, self._echo, self._storage.bulk, self._others
        )
        payments = self._job_terms.payments
        servicers = Servicers(
            health=self._health,
            jobs=job_servicer(self._resources, self._job_terms, self._needs),
            operator=operator,
            serving=serving_servicer(self._resources, self._nodes, certifier),
            nodes=node_servicer(
                self._resources, greeter, gate, enrolment, self._job_terms.payments
            ),
            node_gate=gate,
            payments=payments,
            check_driving=self._driver.journal.database.check_driving,
        )
        updates = SentUpdates(gate, servicers.nodes.intake, servicers.check_driving)
        self._storage.bulk.take_updates(updates)
        token_file = self._settings.data_dir / OPERATOR_TOKEN
        await asyncio.to_thread(self._write_operator_token, token_file, addresses)
        await self._listeners.start(servicers, self._tokens, self._guesses)
        self._health.set_serving(is_serving=True)
        try:
            self._announce(addresses, token_file)
        except HyperGPUError:
            # Standard output takes nothing: nobody would learn where this listens.
            await self._listeners.stop(0)
            raise

    def _announce(self, addresses: tuple[str, ...], token_file: Path) -> None:
        host = self._settings.listen
        local = (
            host if is_loopback(host) or host in addresses else dialled_hosts(self._settings)[-1]
        )
        payments = self._job_terms.payments
        ready = Ready(
            address=joined_address(local, self._listeners.port),
            addresses=addresses,
            node_port=self._listeners.node_port,
            bulk_port=self._storage.bulk.port,
            operator_token_file=str(token_file),
            authority=self._digest,
            process_id=os.getpid(),
            metrics_port=self._metrics.port,
            chain=None if payments is None else payments.summary(),
        )
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        log.info("serving", addresses=addresses, node_port=self._listeners.node_port)

    def _write_operator_token(self, path: Path, addresses: tuple[str, ...]) -> None:
        """Keep the operator's token on this machine, with the addresses of this start."""
        token = self._known_operator_token(path)
        if token is None:
            grant = TokenGrant(Role.OPERATOR, ttl_s=0, uses=0, label="first start")
            token = self._tokens.create(
                grant, addresses=addresses, authority=self._digest, now_s=unix_s()
            )
        token = msgspec.structs.replace(token, addresses=addresses, authority=self._digest)
        write_durably(path, f"{token_text(token)}\n".encode())

    def _known_operator_token(self, path: Path) -> Token | None:
        try:
            token = parse_token(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, HyperGPUError):
            return None
        token_record = {record.token_id: record for record in self._tokens.tokens()}.get(token.id)
        is_good = (
            token_record is not None
            and token_record.role is Role.OPERATOR
            and not token_record.is_revoked
        )
        return token if is_good else None

    def _after_drain(self, decision: Decision) -> None:
        payments = self._job_terms.payments
        if payments is not None and decision.concerns_payments:
            payments.wake()
        if self._outbox is not None:
            self._outbox.wake(decision.jobs)
        self._fleet.health.record_evidence(decision.evidence, self._fleet.nodes.progress)
        for job_id in decision.jobs:
            if (runtime := self._driver.runtimes.get(job_id)) is not None:
                self._resources.performing.after_drain(runtime)
        if decision.moves_nodes:
            self._fleet.allocator.review()
            # Updates that arrive make nothing superfluous.
            self._collector.request()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if self._is_stopping.is_set():
                log.warning("stopped at once; the journal holds everything that was answered")
                os._exit(1)
            self._is_stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)

    async def _leave(self) -> None:
        log.info("stopping: no new calls, those under way may end")
        self._health.set_serving(is_serving=False)
        self._health.close()
        self._fleet.nodes.close()
        self._driver.begin_closing()
        await self._listeners.stop(self._settings.drain_timeout_ms / 1000)

    async def _close(self) -> None:
        for runtime in self._driver.runtimes.values():
            runtime.close()
        self._echo.close()
        health = self._fleet.health
        await store_node_counts(self._driver, self._fleet.nodes)
        await store_health(self._driver, health, len(health.records))
        await store_speeds(self._driver, self._fleet.readings.speeds, NODES_MOST)
        await self._resources.evaluators.stop()
        await self._resources.heavy.close()
        if self._outbox is not None:
            await self._outbox.close()
        if self._job_terms.payments is not None:
            await self._job_terms.payments.stop()
        self._driver.journal.close()


async def _run_payments(payments: PaymentsPlugin) -> None:
    """Run payments until cancelled; training goes on whatever breaks in them."""
    while True:
        try:
            return await payments.run()
        except Exception:
            log.exception("payments broke and are started again")
            await asyncio.sleep(_PAYMENTS_RETRY_S)


def _check_settings(settings: Settings) -> None:
    if settings.plaintext and not is_loopback(settings.listen):
        detail = f"--plaintext needs a loopback address, not --listen {settings.listen}"
        raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail)
    check_hosts(settings.advertise)
    _make_folder(settings.data_dir)


def _tell_findings(journal: Journal) -> None:
    for finding in journal.findings:
        log.error("the journal was mended", finding=finding)


def _open_authority(settings: Settings) -> Authority | None:
    """The CA of this coordinator; None: nothing here is encrypted."""
    if settings.plaintext:
        return None
    return Authority.open(settings.data_dir / "identity", unix_s())


def _make_folder(folder: Path) -> None:
    try:
        require_private_folder(folder)
    except OSError as error:
        detail = f"the folder {folder} cannot be made: {error.strerror}"
        fix = "choose a folder that you may write: --data-dir FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
