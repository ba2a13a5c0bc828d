"""What commands and servicers get instead of anything global: the services of a coordinator, who
works for whom, offered updates, terms of new jobs, and periodic work.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from coordinator.config import Settings
from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.events import UpdateReceived
from coordinator.core.training.job.state import ENDED, Phase
from coordinator.core.work.funding import Funding
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from coordinator.shell.bulk.store import BulkStore
from coordinator.shell.engine.evaluation import EngineEvaluator
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.failpoints import failpoint
from coordinator.shell.journal.coordinators import OtherCoordinators
from coordinator.shell.journal.journal import Journal
from coordinator.shell.journal.records import JournalError
from coordinator.shell.journal.registry import NONCE_MAX
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.runtime.allocator import NodeAllocator
from coordinator.shell.runtime.driver import Driver, JobRuntime
from coordinator.shell.runtime.fleet_health import MINUTE_S, STORED_A_MINUTE, FleetHealth
from coordinator.shell.runtime.nodes import ConnectedNodes
from coordinator.shell.runtime.readings import Readings
from hypergpu.engine.engine import Engine
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentsPlugin
from hypergpu.ids import Address, Digest, JobId, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.process import make_way
from hypergpu.statements import Domain, Lease, Terms, terms_of
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import node_pb2

log = structlog.get_logger()
Result = TypeVar("Result")

NOW = Milliseconds(0)
"""Placeholder: the driver stamps events with job time as they enter its inbox."""


class OfferedUpdate(NamedTuple):
    """An update that its node may send, under the node's newest nonce."""

    job_id: JobId
    received: UpdateReceived
    """The event once it is whole."""
    upload: str
    """Its name in the quarantine."""
    is_fresh: "asyncio.Future[bool]"
    """Once the nonce is used up durably: whether it was above all before."""
    offered_ms: Milliseconds
    phases: node_pb2.PhaseDurations | None
    """What the node said then of its work so far."""


class UpdateOffers:
    """The newest offer of each node, and the journalled marks of nonces of those that were heard
    since the start. A nonce must be above its node's mark.
    """

    def __init__(self) -> None:
        self._marks: dict[NodeId, int] = {}
        self._offers: dict[NodeId, OfferedUpdate] = {}
        self._rejected: dict[tuple[NodeId, JobId], int] = {}

    def knows(self, node: NodeId) -> bool:
        """Whether the node's mark was read from the journal."""
        return node in self._marks

    def learn(self, node: NodeId, mark: int) -> None:
        """The mark in the journal, which may have been passed meanwhile."""
        self._marks[node] = max(mark, self._marks.get(node, 0))

    def check_nonce(self, node: NodeId, nonce: int) -> None:
        """Reject a nonce that is not above all that were used, or above all that may be.

        Raises:
            HyperGPUError: NONCE_REPLAYED.
        """
        if nonce > NONCE_MAX:
            raise HyperGPUError(Reason.NONCE_REPLAYED, f"nonce {nonce} is above {NONCE_MAX}")
        if nonce <= self._marks[node]:
            detail = f"nonce {nonce} is not above {self._marks[node]}"
            raise HyperGPUError(Reason.NONCE_REPLAYED, detail)

    def put(self, offered: OfferedUpdate) -> None:
        """Take the place of the node's former offer, and use the nonce up."""
        node, nonce = offered.received.node, offered.received.update.nonce
        self._marks[node] = max(nonce, self._marks[node])
        self._offers[node] = offered

    def is_first_rejection(self, node: NodeId, job_id: JobId, round_: int) -> bool:
        """Whether this is the first of the member's rejected updates while the job is in a round.
        The others are not journalled: anybody may offer late updates as often as calls are let in.
        """
        before, self._rejected[node, job_id] = self._rejected.get((node, job_id)), round_
        return before != round_

    def of(self, node: NodeId, lease: Lease, digest: Digest) -> OfferedUpdate | None:
        """The node's newest offer, if it is of this update under this lease of this job."""
        offered = self._offers.get(node)
        if offered is None:
            return None
        received = offered.received
        offered_lease = Lease(offered.job_id, received.round, received.lease)
        is_this = (offered_lease, received.update.blob.digest) == (lease, digest)
        return offered if is_this else None


class HeavyWork:
    """Threads for long computing, as many as there are cores, that make way for the event loop.

    Args:
        engine: Computes what is cut into tasks; None: these threads do.
        parameters_least: Size from which models are worth asking it.
    """

    def __init__(self, engine: Engine | None = None, parameters_least: int = 0) -> None:
        self._engine = engine
        self._parameters_least = parameters_least
        self._threads = ThreadPoolExecutor(
            os.cpu_count() or 1, thread_name_prefix="heavy", initializer=make_way
        )

    def engine_for(self, parameters_count: int) -> Engine | None:
        """Who folds a model of that size; None: these threads do."""
        return self._engine if parameters_count >= self._parameters_least else None

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do the work in one of them. Cancelling the caller does not end it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """End the processes of the engine."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)


class Commits:
    """Uploads that are being checked: a caller that goes away ends none, and another one waits."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, upload: str, commit: Callable[[], Coroutine[None, None, None]]) -> None:
        """Commit an upload, or wait for whoever does. Raises what the commit raises."""
        task = self._tasks.get(upload)
        if task is None:
            task = self._tasks[upload] = asyncio.create_task(commit(), name="commit")
            task.add_done_callback(lambda done: self._end(upload, done))
        await asyncio.shield(task)

    async def wait(self, upload: str) -> None:
        """Wait until the upload is not being committed, whatever comes of it."""
        if (task := self._tasks.get(upload)) is not None:
            await asyncio.wait([task])

    def _end(self, upload: str, done: "asyncio.Task[None]") -> None:
        del self._tasks[upload]
        if not done.cancelled():
            done.exception()


UNFUNDED = Funding(0, "the escrow is not on the ledger yet")
"""A paid job starts with this: its first round waits for `FundingChanged`."""


class NewJobTerms(NamedTuple):
    """What a new job begins with, with and without the payments package."""

    owner: Address
    payments: PaymentsPlugin | None

    def terms(self, job_id: JobId, pay: Pay) -> Terms:
        """Terms under which the work of a new job is signed.

        Raises:
            HyperGPUError: The job pays, and nothing here can pay it.
        """
        if self.payments is not None:
            return self.payments.terms(job_id, pay)
        if pay.unit_price:
            detail = "the job pays, and this coordinator has no payments package"
            fix = "remove unit_price from [pay], or install it: pip install 'hypergpu[chain]'"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
        return terms_of(self.owner, job_id, Domain())

    def funding(self, pay: Pay) -> Funding | None:
        """Funding of a new job; None: nothing limits its work."""
        return UNFUNDED if self.payments is not None and pay.unit_price else None


DATASETS = "datasets"
"""The folder of users' data within the coordinator's own."""


class Pins:
    """BlobStore whose event is not journalled yet. Any thread may call."""

    def __init__(self) -> None:
        self._counts: Counter[Digest] = Counter()
        self._lock = threading.Lock()
        self.collecting = asyncio.Lock()
        """Lock of a collection, which does not know of pins that come while it runs."""

    def add(self, digests: Iterable[Digest]) -> None:
        """Keep these."""
        with self._lock:
            self._counts.update(digests)

    def drop(self, digests: Iterable[Digest]) -> None:
        """Take back one `add`."""
        with self._lock:
            self._counts.subtract(digests)
            self._counts = +self._counts

    def all(self) -> frozenset[Digest]:
        """Everything that is kept."""
        with self._lock:
            return frozenset(self._counts)


_WAITS_FOR_EVALUATOR = frozenset({Phase.PREPARING, Phase.AGGREGATING, Phase.FINISHING})


def evaluated_job(runtime: JobRuntime) -> EvaluatorJob:
    """A job as the evaluators know it."""
    return EvaluatorJob(runtime.job.job_id, runtime.job.owner)


class Services(NamedTuple):
    """Everything, wired in `coordinator.shell.app.startup`."""

    settings: Settings
    journal: Journal
    blobs: BlobStore
    uploads: UploadStore
    evaluator: EvaluatorPool | EngineEvaluator
    driver: Driver
    nodes: ConnectedNodes
    allocator: NodeAllocator
    pins: Pins
    offers: UpdateOffers
    commits: Commits
    heavy: HeavyWork
    readings: Readings
    """Readings of every node's line and speed, made anew after a restart."""
    echo: ProbeEcho
    bulk: BulkStore
    job_terms: NewJobTerms
    others: OtherCoordinators
    """Coordinators that may take over from this one."""
    health: FleetHealth
    """Health of every node, which outlives restarts."""
    sketch_secret: bytes
    """32 bytes that the signs of all sketches follow from; nobody else may know them."""

    def job_dir(self, job_id: JobId) -> Path:
        """Where the shell keeps files of one job; deleted with it."""
        return self.settings.data_dir / "jobs" / job_id

    @property
    def datasets_dir(self) -> Path:
        """Users' data laid out as folders for the evaluator."""
        return self.settings.data_dir / DATASETS

    def obstacle(self, runtime: JobRuntime) -> str:
        """Numbered reason for which a job waits; empty: it goes on, or has ended."""
        if runtime.job.phase in ENDED:
            return ""
        return runtime.obstacle or self.bulk.obstacle or self._evaluator_reason(runtime)

    def waiting_reason(self, runtime: JobRuntime) -> str:
        """Reason for which the job waits, beyond what its journal tells; empty: there is none."""
        obstacle = self.obstacle(runtime)
        if obstacle or runtime.job.phase not in {Phase.WAITING, Phase.PREPARING}:
            return obstacle
        return self.allocator.outlook(runtime.job.job_id)

    def _evaluator_reason(self, runtime: JobRuntime) -> str:
        """Why the job waits for an evaluator; empty where it does not, or has other work."""
        if runtime.job.phase not in _WAITS_FOR_EVALUATOR:
            return ""
        return self.evaluator.waiting_reason(evaluated_job(runtime))

    def needed_blobs(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        found = set(self.pins.all())
        for runtime in self.driver.runtimes.values():
            found |= live_blobs(runtime.job) | (runtime.entries_of_manifest or frozenset())
            if runtime.job.phase not in ENDED:
                # A coordinator that takes over would have to make it anew.
                found.add(runtime.job.layout)
        return frozenset(found)

    def knows_needed_blobs(self) -> bool:
        """Whether no job may need more than `needed_blobs`."""
        runtimes = self.driver.runtimes.values()
        is_read = all(runtime.entries_of_manifest is not None for runtime in runtimes)
        return is_read and not self.driver.unreadable


_COLLECT_PAUSE = 9
"""Times as long as it took: whatever the number of blobs, a tenth of one thread collects."""
_COLLECT_EVERY_S = 30.0
_STORE_S = 5.0


class BlobCollector:
    """Removes blobs that no job needs, soon after one has moved on."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._is_requested = asyncio.Event()

    def request(self) -> None:
        """Collect soon: some job needs less than before."""
        self._is_requested.set()

    async def run(self) -> None:
        """Collect on request, as often as that is cheap, and every half minute, for ever.

        Soon is worth it: what the round before left is written over while it is still in the
        caches of the system, and fresh pages cost it several times as much.
        """
        expired_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_COLLECT_EVERY_S):
                    await self._is_requested.wait()
            self._is_requested.clear()
            began_s = time.monotonic()
            if began_s - expired_s >= _COLLECT_EVERY_S:
                await asyncio.to_thread(self._services.uploads.expire)
                expired_s = began_s
            if not self._services.driver.unreadable:
                await self._discard_void_uploads()
            await collect(self._services)
            await asyncio.sleep(_COLLECT_PAUSE * (time.monotonic() - began_s))

    async def _discard_void_uploads(self) -> None:
        """Discard uploads under leases that have ended."""
        uploads = self._services.uploads
        # Listed before the runtimes are asked: an upload under a newer lease has another file.
        owned = uploads.owned_uploads()
        open_uploads = {
            name
            for runtime in self._services.driver.runtimes.values()
            for name in runtime.open_uploads()
        }
        if not owned:
            return
        if count := await asyncio.to_thread(uploads.forget, owned, keeps=open_uploads):
            log.debug("uploads under void leases were discarded", uploads=count)


async def collect(services: Services) -> Bytes:
    """Remove the blobs that no job needs, as far as that is known. Returns how much that freed."""
    async with services.pins.collecting:
        failpoint("collect.begin")
        mark = services.blobs.mark()
        is_sure, live = services.knows_needed_blobs(), services.needed_blobs()
        try:
            collected = await asyncio.to_thread(
                services.blobs.collect, live, mark=mark, spares_older=not is_sure
            )
        except (HyperGPUError, OSError) as failed:
            log.warning("blobs were not collected", reason=str(failed))
            return Bytes(0)
    failpoint("collect.done")
    services.bulk.remove(collected.digests)
    if collected.digests:
        log.debug("blobs were collected", freed_bytes=collected.freed_bytes)
    return collected.freed_bytes


async def copy_leftovers(services: Services) -> None:
    """Copy to where blobs outlive this machine what an earlier process left only here: first what
    jobs need, later what was not collected meanwhile.
    """
    leftovers = services.blobs.unsynced_blobs
    needed = services.needed_blobs()
    for digest in sorted(leftovers & needed):
        await _copy_leftover(services, digest)
    await asyncio.sleep(_COLLECT_EVERY_S)
    for digest in sorted(leftovers - needed):
        await _copy_leftover(services, digest)


async def _copy_leftover(services: Services, digest: Digest) -> None:
    while True:
        try:
            return await asyncio.to_thread(services.blobs.sync, digest)
        except HyperGPUError as refused:
            if refused.reason is Reason.BLOB_UNKNOWN:
                return None  # It was collected.
            log.warning("a blob is only here", blob=digest, reason=str(refused))
        except OSError as failed:
            log.warning("a blob is only here", blob=digest, reason=str(failed))
        await asyncio.sleep(_STORE_S)


async def keep_others_known(services: Services) -> None:
    """Read every few seconds which other coordinators there are, for ever."""
    while True:
        try:
            await asyncio.to_thread(services.others.refresh)
        except JournalError as failed:
            log.warning("other coordinators are not read", reason=str(failed))
        await asyncio.sleep(_STORE_S)


async def keep_node_counts(services: Services) -> None:
    """Store nodes' counters and last contacts every few seconds, for ever."""
    while True:
        await asyncio.sleep(_STORE_S)
        await store_node_counts(services)


async def store_node_counts(services: Services) -> None:
    """Store last contacts, and counts since the last time."""
    nodes, counts = services.nodes, dict(services.nodes.counts)
    now_ms = time.time_ns() // 1_000_000
    seen = {node: now_ms - (nodes.silent_ms(node) or 0) for node in nodes.streams}
    try:
        await services.driver.in_writer(services.journal.record_activity, seen, counts)
    except HyperGPUError as refused:
        log.warning("counters are not stored yet", reason=str(refused))
        return
    for node, stored in counts.items():
        nodes.count(node, accepted=-stored.accepted, rejected=-stored.rejected)


async def keep_health(services: Services) -> None:
    """Look at every node's health once a minute and store it, and the speeds, for ever.

    The first look is a minute after the start: nodes need that long to dial in again.
    """
    while True:
        await asyncio.sleep(MINUTE_S)
        health, readings, streams = services.health, services.readings, services.nodes.streams
        if await health.look(streams, readings.by_node()):
            services.allocator.review()
        await store_health(services)
        services.readings.speeds.forget_old()
        await store_speeds(services)


async def store_health(services: Services, most: int = STORED_A_MINUTE) -> None:
    """Store at most so many records of nodes' health that changed, the longest unstored first."""
    records, removed = services.health.records_to_store(most), tuple(services.health.forgotten)
    try:
        await services.driver.in_writer(services.journal.store_health, records, removed)
    except HyperGPUError as refused:
        log.warning("health is not stored yet", reason=str(refused))
        return
    services.health.mark_stored(records, removed)


async def store_speeds(services: Services, most: int = STORED_A_MINUTE) -> None:
    """Store at most so many records of nodes' speeds that changed, the longest unstored first."""
    speeds = services.readings.speeds
    records, removed = speeds.records_to_store(most), tuple(speeds.forgotten)
    try:
        await services.driver.in_writer(services.journal.store_speeds, records, removed)
    except HyperGPUError as refused:
        log.warning("speeds are not stored yet", reason=str(refused))
        return
    speeds.mark_stored(records, removed)
