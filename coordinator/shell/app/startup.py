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
from typing import Any

import msgspec
import structlog

from coordinator.config import Settings
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
from coordinator.shell.app.takeover import Turn, end_turn, is_away, open_blobs, take_turn
from coordinator.shell.blob_collector import BlobCollector, copy_leftovers
from coordinator.shell.driver.decisions import Decision
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.job_terms import NewJobTerms
from coordinator.shell.driver.kinds import KindTable
from coordinator.shell.driver.replay import replay_jobs
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.engine.evaluation import EngineEvaluator, EvaluatorPlace
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.seat import EvaluatorLimits, SeatMaker, clear_seats, machine_limits
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performing import perform
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.nodes.fleet_speeds import NODES_MOST, FleetSpeeds
from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.nodes.readings import Readings
from coordinator.shell.nodes.update_offers import UpdateOffers
from coordinator.shell.outbox.opening import open_outbox
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import ProbeTokens
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.gateways import GatewayCertifier
from coordinator.shell.service.job import JobServicer
from coordinator.shell.service.node import NodeServicer
from coordinator.shell.service.node_session import Enrolment
from coordinator.shell.service.operator import OperatorServicer
from coordinator.shell.services import DATASETS, Services
from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.upload_commits import Commits
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.blobs.writing import Space, kept_secret
from coordinator.shell.store.bulk.messages import BytesReceived, BytesServed, Certificates
from coordinator.shell.store.bulk.opening import BulkPlace, open_store
from coordinator.shell.store.datasets import clear_unfinished
from coordinator.shell.store.journal.file_lock import FileLock
from hypergpu.clock import unix_s
from hypergpu.durable import write_durably
from hypergpu.engine.opening import open_engine
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentsPlugin, PaymentSummary
from hypergpu.ids import Address, Digest
from hypergpu.privacy import require_private_folder
from hypergpu.sandbox.sandbox import SandboxKind
from hypergpu.units import Bytes, Milliseconds
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

    def __init__(self, settings: Settings, kinds: KindTable) -> None:
        """Open everything on disk and replay the journal. Blocks.

        Args:
            settings: Of this process.
            kinds: Kinds of work that it drives.

        Raises:
            HyperGPUError: plaintext is asked for beyond loopback, a host to advertise is none, or
                the folder cannot be made, or others can change it.
            JournalError: another coordinator runs here, or the journal cannot be read.
        """
        if settings.plaintext and not is_loopback(settings.listen):
            detail = f"--plaintext needs a loopback address, not --listen {settings.listen}"
            raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail)
        check_hosts(settings.advertise)
        _make_folder(settings.data_dir)
        self._settings = settings
        FileLock(settings.data_dir / "journal")  # To the process's end, wherever that lies.
        turn = take_turn(settings)
        self._services = _open_services(settings, turn, kinds)
        journal = self._services.journal
        self._authority = None
        if not settings.plaintext:
            self._authority = Authority.open(settings.data_dir / "identity", unix_s())
        self._digest = self._authority.digest if self._authority else _NO_AUTHORITY
        turn.keep_secrets()
        if (tenure := journal.database.tenure) is not None:
            tenure.tell(partial(end_turn, settings))
        self._tokens = IssuedTokens(journal)
        self._nodes = KnownNodes(journal)
        self._guesses = GuessLimiter()
        replay = replay_jobs(journal, kinds)
        self._services.driver.all_runtimes.update(replay.runtimes)
        self._services.driver.unreadable.update(replay.unreadable)
        failpoint("recover.replayed")
        self._collector = BlobCollector(self._services)
        self._health = HealthServicer()
        self._outbox = open_outbox(self._services, partial(self._health.set_part, EVENTS))
        self._listeners = Listeners(settings, self._authority)
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Anything that breaks the driver ends the process too."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        hosts = dialled_hosts(self._settings)
        await self._bind(hosts)
        self._catch_signals()
        # Before anything else runs: an error here ends the start with its own words.
        payments = self._services.job_terms.payments
        if payments is not None:
            await payments.start()
        async with asyncio.TaskGroup() as tasks:

            def begin(work: Coroutine[object, object, object]) -> asyncio.Task[object]:
                task = tasks.create_task(work)
                task.add_done_callback(self._check_turn)
                return task

            driving = begin(self._services.driver.run(self._perform, self._after_drain))
            forever = [
                begin(self._services.allocator.run()),
                begin(self._services.allocator.watch(Milliseconds(self._settings.lost_after_ms))),
                begin(self._collector.run()),
                begin(keep_node_counts(self._services)),
                begin(keep_health(self._services)),
                begin(keep_others_known(self._services)),
                begin(copy_leftovers(self._services)),
                begin(self._services.bulk.run()),
            ]
            forever += [
                begin(
                    self._services.driver.kinds.of_job(runtime.job).take_up(self._services, runtime)
                )
                for runtime in list(self._services.driver.all_runtimes.values())
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
            self._services.driver.close()
            await driving
        await self._metrics.close()
        await self._close()

    async def _bind(self, hosts: tuple[str, ...]) -> None:
        """Take every port, and answer on the one for metrics."""
        settings = self._settings
        self._listeners.bind(hosts, unix_s())
        node_port = self._services.readings.node_port = self._listeners.node_port
        await self._services.echo.open(settings.listen, node_port)
        certificates = self._bulk_certificates(hosts)
        await self._services.bulk.bind(settings.listen, settings.bulk_port, certificates)
        judges = (self._tokens, self._guesses)
        self._metrics = await open_metrics(settings, self._services, judges, certificates)

    def _check_turn(self, ended: asyncio.Task[object]) -> None:
        """End this process at once where its turn is over: no call of it is to be ended in order,
        nor anything that hangs to be waited for, while another coordinator could drive.
        """
        if ended.cancelled() or (broken := ended.exception()) is None:
            return
        if self._settings.takeover and is_away(broken):
            end_turn(self._settings, str(broken))

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
        enrolment.bulk_port = self._services.bulk.port
        enrolment.others = self._services.others
        operator = OperatorServicer(
            self._services, tokens=self._tokens, nodes=self._nodes, authority=self._digest
        )
        operator.addresses = addresses
        operator.gateways = GatewayCertifier(
            self._authority, enrolment.ports, lost_after_ms=self._settings.lost_after_ms
        )
        servicers = Servicers(
            health=self._health,
            jobs=JobServicer(self._services),
            operator=operator,
            nodes=NodeServicer(self._services, gate, enrolment),
            node_gate=gate,
            payments=self._services.job_terms.payments,
            check_driving=self._services.journal.database.check_driving,
        )
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
        payments = self._services.job_terms.payments
        ready = Ready(
            address=joined_address(local, self._listeners.port),
            addresses=addresses,
            node_port=self._listeners.node_port,
            bulk_port=self._services.bulk.port,
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
        known = {record.token_id: record for record in self._tokens.tokens()}.get(token.id)
        is_good = known is not None and known.role is Role.OPERATOR and not known.is_revoked
        return token if is_good else None

    def _perform(self, runtime: WorkRuntime[Any], command: object) -> None:
        perform(self._services, runtime, command)

    def _after_drain(self, decision: Decision) -> None:
        payments = self._services.job_terms.payments
        if payments is not None and decision.concerns_payments:
            payments.wake()
        if self._outbox is not None:
            self._outbox.wake(decision.jobs)
        health, progress = self._services.health, self._services.nodes.progress
        health.record_evidence(decision.evidence, progress)
        for job_id, job in decision.jobs.items():
            if (runtime := self._services.driver.all_runtimes.get(job_id)) is not None:
                self._services.driver.kinds.of_job(job).after_drain(self._services, runtime)
        if decision.moves_nodes:
            self._services.allocator.review()
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
        self._services.nodes.close()
        self._services.driver.begin_closing()
        await self._listeners.stop(self._settings.drain_timeout_ms / 1000)

    async def _close(self) -> None:
        for runtime in self._services.driver.all_runtimes.values():
            runtime.close()
        self._services.echo.close()
        await store_node_counts(self._services)
        await store_health(self._services, len(self._services.health.records))
        await store_speeds(self._services, NODES_MOST)
        await self._services.evaluator.stop()
        await self._services.heavy.close()
        if self._outbox is not None:
            await self._outbox.close()
        if self._services.job_terms.payments is not None:
            await self._services.job_terms.payments.stop()
        self._services.journal.close()


async def _run_payments(payments: PaymentsPlugin) -> None:
    """Run payments until cancelled; training goes on whatever breaks in them."""
    while True:
        try:
            return await payments.run()
        except Exception:
            log.exception("payments broke and are started again")
            await asyncio.sleep(_PAYMENTS_RETRY_S)


def _make_folder(folder: Path) -> None:
    try:
        require_private_folder(folder)
    except OSError as broken:
        detail = f"the folder {folder} cannot be made: {broken.strerror}"
        fix = "choose a folder that you may write: --data-dir FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from broken


def _open_services(settings: Settings, turn: Turn, kinds: KindTable) -> Services:
    journal, key = turn.journal, turn.key
    for finding in journal.findings:
        log.error("the journal was mended", finding=finding)
    place = BulkPlace(settings.data_dir, settings.blobs, key.node_id)
    space = Space(settings.data_dir, settings.disk_quota_bytes)
    blobs = open_blobs(settings.data_dir, space, turn.kept)
    uploads = UploadStore(settings.data_dir, blobs, space)
    clear_unfinished(settings.data_dir / DATASETS)
    driver, nodes = Driver(journal, kinds), ConnectedNodes(journal.pauses())
    payments = load_payments(PaymentsHost(settings, key, journal, driver, nodes))

    engine = open_engine(settings.engine) if settings.engine else None
    clear_seats(settings.data_dir)
    limits = evaluator_limits(settings)
    evaluator = EvaluatorPool(SeatMaker(settings.data_dir, limits))
    readings = Readings(speeds=FleetSpeeds(journal.speeds()))
    health = FleetHealth(journal.health())

    def count_bytes(moved: BytesServed | BytesReceived) -> None:
        if isinstance(moved, BytesReceived):
            if moved.sender is not None:
                readings.upload_meter(moved.sender).add(moved)
                failpoint("upload.received")
        elif (runtime := driver.runtimes.get(moved.purpose)) is not None:
            runtime.bytes_down = Bytes(runtime.bytes_down + moved.size_bytes)

    return Services(
        settings=settings,
        journal=journal,
        blobs=blobs,
        uploads=uploads,
        evaluator=evaluator
        if engine is None
        else EngineEvaluator(
            engine, evaluator, EvaluatorPlace(str(settings.data_dir.absolute()), limits)
        ),
        driver=driver,
        nodes=nodes,
        allocator=NodeAllocator(driver, nodes, journal, Milliseconds(settings.job_turn_ms), health),
        pins=Pins(),
        offers=UpdateOffers(),
        commits=Commits(),
        heavy=HeavyWork(engine, settings.engine_parameters_least),
        readings=readings,
        echo=ProbeEcho(ProbeTokens(), nodes.streams.__contains__),
        bulk=open_store(place, blobs, uploads, count_bytes, turn.kept),
        job_terms=NewJobTerms(Address(key.node_id), payments),
        others=turn.others,
        health=health,
        sketch_secret=kept_secret(settings.data_dir / "sketches.secret"),
    )


def evaluator_limits(settings: Settings) -> EvaluatorLimits:
    """What evaluators may take on this machine."""
    return machine_limits(
        EvaluatorLimits(
            answer_s=settings.evaluator_limit_s,
            memory_bytes=settings.evaluator_memory_bytes,
            places=settings.evaluators,
            spares=settings.evaluator_spares,
            sandbox=SandboxKind(settings.evaluator_sandbox),
        )
    )
