"""The daemon: inbox -> transition -> persist -> perform, until it leaves.

Nothing here is shared between two of them: one process may run many.
"""

import asyncio
import os
from typing import NamedTuple

import structlog

from gpu_node.config import Settings
from gpu_node.core.commands import (
    AbortTraining,
    AnnounceDraining,
    Command,
    DeleteJobState,
    EndWorker,
    FetchInputs,
    HandBack,
    Join,
    Leave,
    OpenLink,
    SetTimer,
    StartWorker,
    StopFetch,
    StopUpload,
    Train,
    Upload,
)
from gpu_node.core.events import (
    DrainRequested,
    Event,
    Joined,
    JoinFailed,
    JoinRefused,
    Started,
    StopRequested,
    Timer,
    TimerFired,
    TrainingFinished,
)
from gpu_node.core.memory import Memory
from gpu_node.core.session import fresh_session, transition
from gpu_node.core.state import Patience, Session
from gpu_node.shell.link.access import Access, Applicant, join
from gpu_node.shell.link.control import ControlLink
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.logs import note
from gpu_node.shell.probe.pace import Pace
from gpu_node.shell.probe.prober import Prober
from gpu_node.shell.state.files import (
    Coordinator,
    kept_name,
    load_memory,
    load_ready,
    save_memory,
    save_ready,
)
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from gpu_node.shell.supervision import WorkerProcess, worker_caps, worker_command, worker_kind
from gpu_node.shell.training import Trainer
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.drawing import Drawing
from gpu_node.shell.transfer.upload import Uploader
from gpu_node.shell.transfer_tasks import TransferTasks
from gpu_node.shell.translate import capabilities_message
from gpu_node.shell.worker.messages import Ready
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.keys.passphrase import Passphrase
from hypergpu.process.clock import monotonic_ms
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import lease_message
from hypergpu.wire.token import Token

log = structlog.get_logger()

_JOIN_TRIED_AGAIN = frozenset(
    {Reason.COORDINATOR_UNREACHABLE, Reason.NOT_READY, Reason.RATE_LIMITED, Reason.CALL_BROKEN}
)
"""Refusals of a join after which the next try may succeed."""


class Runtime:
    """One daemon over one state folder, whose lock the caller holds."""

    def __init__(
        self,
        settings: Settings,
        places: Places,
        *,
        token: Token | None = None,
        passphrase: Passphrase | None = None,
    ) -> None:
        self._settings = settings
        self._places = places
        self._name = kept_name(places, settings.name)
        self._token = token
        self._identity = identity_key(places, passphrase)
        self._event_queue = EventQueue()
        self._access = Access(
            places, self._identity, congestion_control=settings.congestion_control
        )
        self._kind = worker_kind(settings.worker)
        self._worker = WorkerProcess(
            worker_command(self._kind),
            os.environ
            | worker_caps(
                settings.worker_threads,
                settings.worker_memory_bytes,
                settings.worker_step_floor_ms,
            ),
        )
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._joining: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._session: Session = fresh_session(
            self._identity.node_id,
            load_memory(places),
            drain_limit_ms=Milliseconds(settings.drain_limit_ms),
            reconnect_cap_ms=Milliseconds(settings.reconnect_cap_ms),
            patience=Patience(
                first_ms=Milliseconds(settings.first_progress_limit_ms),
                later_ms=Milliseconds(settings.progress_limit_ms),
            ),
        )

    @property
    def session(self) -> Session:
        """What the node knows."""
        return self._session

    @property
    def worker_process_id(self) -> int | None:
        """Of the worker; None while there is none."""
        return self._worker.process_id

    def drain(self, reason: str) -> None:
        """Finish or hand back, then leave."""
        self._event_queue.event(DrainRequested(at_ms=monotonic_ms(), reason=reason))

    def stop(self, reason: str) -> None:
        """Leave now."""
        self._event_queue.event(StopRequested(at_ms=monotonic_ms(), reason=reason))

    async def join(self) -> Coordinator:
        """Trade the token for a certificate, and nothing else.

        Raises:
            HyperGPUError: It did not succeed, with the reason.
        """
        try:
            applicant = self._applicant(self._capable(await self._learn_capabilities()))
            return await join(applicant, self._given_token())
        finally:
            await self._worker.stop()

    async def run(self, ready: Ready | None = None) -> Leave:
        """Serve until the node leaves.

        Args:
            ready: What the worker can do, when it is known; the worker is then spawned at the first
                training only.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it never got ready on the first start.
        """
        await asyncio.to_thread(_forget_strangers, self._places, self._session.memory)
        known = ready or await asyncio.to_thread(load_ready, self._places, self._kind)
        try:
            tools = self._tools(known or await self._learn_capabilities())
        except BaseException:
            await self._worker.stop()
            raise
        if ready is None and known is not None:
            tools.link.worker_starts()
            self._warming = asyncio.create_task(self._warm(tools, known), name="warm")
            self._warming.add_done_callback(self._event_queue.inspect)
        # A token is given to join with, also by a node that has joined before.
        has_certificate = self._token is None and self._access.is_joined
        self._event_queue.event(Started(at_ms=monotonic_ms(), has_certificate=has_certificate))
        try:
            while True:
                leave = await self._advance(tools, await self._event_queue.next())
                if leave is not None:
                    return leave
        finally:
            await self._close(tools)

    async def _learn_capabilities(self) -> Ready:
        """What the worker can do, from itself."""
        ready = await self._worker.ready()
        await asyncio.to_thread(save_ready, self._places, ready)
        return ready

    async def _warm(self, tools: "_Tools", known: Ready) -> None:
        """Start the worker while the node dials in with what it could do the last time.

        Torch takes so long to load that a node that came back would be given up before it is ready.
        A start that hangs is ended, and what starts workers again for work goes on from there.
        """
        limit_s = self._settings.first_progress_limit_ms / 1000
        why = f"it was not ready within {limit_s:g} s"
        ending = asyncio.get_running_loop().call_later(limit_s, self._worker.end, why)
        try:
            found = await self._learn_capabilities()
        except HyperGPUError as refused:
            log.warning("the worker will be started again", reason=refused.detail)
            found = known
        finally:
            ending.cancel()
        if found == known:
            tools.link.worker_is_ready()
        else:
            tools.link.offer(self._capable(found))

    def _capable(self, ready: Ready) -> node_pb2.Capabilities:
        return capabilities_message(ready, self._name)

    def _tools(self, ready: Ready) -> "_Tools":
        settings, timeout_ms = self._settings, Milliseconds(self._settings.call_timeout_ms)
        capabilities = self._capable(ready)
        pace = Pace(
            round_trip_s=settings.probe_interval_ms / 1000,
            train_s=settings.probe_train_interval_ms / 1000,
            idle_train_s=settings.probe_train_interval_ms * 6 / 1000,
        )
        link = ControlLink(
            self._access,
            capabilities,
            self._event_queue,
            timeout_ms=timeout_ms,
            prober=Prober(pace),
        )
        uploader = Uploader(self._places, self._identity, link.prober.findings, link.receipts)
        cache = BlobCache(self._places, Bytes(settings.cache_bytes))
        trainer = Trainer(
            self._places, self._worker, report=self._event_queue.event, send=link.send
        )
        limit_ms = Milliseconds(settings.first_progress_limit_ms)
        drawing = Drawing(cache, self._worker, limit_ms)
        transfers = TransferTasks(link, cache, uploader, drawing, self._event_queue)
        return _Tools(link, transfers, uploader, trainer, self._applicant(capabilities))

    async def _advance(self, tools: "_Tools", event: Event) -> Leave | None:
        """Decide, persist, act."""
        if isinstance(event, TrainingFinished):
            tools.uploader.made(event.lease)
        before = self._session.memory
        self._session, commands = transition(self._session, event)
        note(event, commands)
        if self._session.memory != before:
            await asyncio.to_thread(save_memory, self._places, self._session.memory)
        for command in commands:
            if isinstance(command, Leave):
                return command
            await self._perform(tools, command)
        return None

    async def _perform(self, tools: "_Tools", command: Command) -> None:
        match command:
            case Join():
                self._joining = asyncio.create_task(self._join(tools.applicant), name="join")
                self._joining.add_done_callback(self._event_queue.inspect)
            case SetTimer(timer=timer, at_ms=at_ms):
                self._set_timer(timer, at_ms)
            case DeleteJobState(job_id=job_id):
                await asyncio.to_thread(self._places.delete_job, job_id)
            case Train(assignment=assignment):
                await tools.trainer.train(command, tools.transfers.inputs[assignment.lease])
            case AbortTraining(lease=lease):
                tools.trainer.abort(lease)
            case StartWorker():
                await tools.trainer.start_worker()
            case EndWorker(reason=reason):
                tools.trainer.end_worker(reason)
            case _:
                tools.perform(command)

    def _applicant(self, capabilities: node_pb2.Capabilities) -> Applicant:
        timeout_ms = Milliseconds(self._settings.call_timeout_ms)
        return Applicant(self._places, self._identity, capabilities, timeout_ms)

    def _given_token(self) -> Token:
        if self._token is None:
            raise HyperGPUError(Reason.NODE_NOT_JOINED, f"{self._places.root} holds no certificate")
        return self._token

    async def _join(self, applicant: Applicant) -> None:
        try:
            await join(applicant, self._given_token())
        except HyperGPUError as refused:
            failed = JoinFailed if refused.reason in _JOIN_TRIED_AGAIN else JoinRefused
            self._event_queue.event(failed(at_ms=monotonic_ms(), reason=str(refused)))
        else:
            self._event_queue.event(Joined(at_ms=monotonic_ms()))

    def _set_timer(self, timer: Timer, at_ms: Milliseconds) -> None:
        before = self._timers.pop(timer, None)
        if before is not None:
            before.cancel()
        delay_s = max(0, at_ms - monotonic_ms()) / 1000
        loop = asyncio.get_running_loop()
        self._timers[timer] = loop.call_later(delay_s, self._fire, timer, at_ms)

    def _fire(self, timer: Timer, at_ms: Milliseconds) -> None:
        # The loop's clock may run a little ahead of the one that deadlines are told in.
        now_ms = max(monotonic_ms(), at_ms)
        self._event_queue.event(TimerFired(at_ms=now_ms, timer=timer))

    async def _close(self, tools: "_Tools") -> None:
        for handle in self._timers.values():
            handle.cancel()
        for task in (self._joining, self._warming):
            if task is not None:
                task.cancel()
        await tools.transfers.close()
        await asyncio.gather(tools.link.close(), self._worker.stop())
        await asyncio.to_thread(self._access.leave_way)


class _Tools(NamedTuple):
    """What a daemon works with once it knows what its worker can do."""

    link: ControlLink
    transfers: TransferTasks
    uploader: Uploader
    trainer: Trainer
    applicant: Applicant

    def perform(self, command: Command) -> None:
        """Perform what needs no waiting."""
        match command:
            case OpenLink(working=working):
                self.link.open(working)
            case FetchInputs(assignment=assignment):
                self.transfers.fetch(assignment)
            case StopFetch(lease=lease):
                self.transfers.stop_fetch(lease)
            case Upload():
                self.transfers.upload(command)
            case StopUpload(lease=lease):
                self.transfers.stop_upload(lease)
            case HandBack(lease=lease, reason=reason):
                back = node_pb2.HandBack(lease=lease_message(lease), reason=reason)
                self.link.send(node_pb2.ControlRequest(hand_back=back))
            case AnnounceDraining(reason=reason):
                draining = node_pb2.Draining(reason=reason)
                self.link.send(node_pb2.ControlRequest(draining=draining))
            case _:
                pass


def _forget_strangers(places: Places, memory: Memory) -> None:
    """Delete what is on disk of jobs that the node does not remember."""
    for folder in places.jobs.iterdir():
        if folder.name not in memory.jobs:
            places.delete_job(JobId(folder.name))
