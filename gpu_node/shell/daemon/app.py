"""The daemon: queue -> transition -> persist -> perform, until it leaves.

Daemons share nothing: one process may run many.
"""

import asyncio
import os
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import structlog

from gpu_node.config import NodeSettings
from gpu_node.core import commands, events, session_state
from gpu_node.core.limits import OwnerLimits, cause_of
from gpu_node.core.phases import PhaseClock
from gpu_node.core.session import transition
from gpu_node.core.session_state import NodeSession, SessionStep
from gpu_node.core.spares import spare_refusal
from gpu_node.shell.daemon.chosen_settings import (
    limited_settings,
    probe_intervals,
    stall_timeouts,
    worker_variables,
)
from gpu_node.shell.daemon.offer import CapabilityOffer, warn_of_hidden_gpu
from gpu_node.shell.daemon.ring_keys import ring_key_for
from gpu_node.shell.daemon.step_log import log_step
from gpu_node.shell.daemon.work_calls import WorkCalls
from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.folder.state import (
    JoinedCoordinator,
    StatePaths,
    identity_key,
    load_capabilities,
    load_memory,
    node_name,
    save_capabilities,
    save_memory,
)
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.calls import (
    command_message,
    phase_message,
    progress_message,
)
from gpu_node.shell.link.control import CoordinatorStream
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.link.probing import Prober
from gpu_node.shell.owner.gate import OwnerGate, bulk_rates
from gpu_node.shell.owner.interpreter import worker_python
from gpu_node.shell.owner.limits_file import (
    refusal_error,
    watch_owner,
    watch_worker,
)
from gpu_node.shell.owner.report import Reporter
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.counts import CountSigning
from gpu_node.shell.transfer.inputs import InitialModels
from gpu_node.shell.transfer.transfers import TransferTasks
from gpu_node.shell.transfer.uploads import Uploader
from gpu_node.shell.worker.own_server.launch import OWN_SERVER_MODULE, own_server_variables
from gpu_node.shell.worker.protocol import DoWork, TrainShard, WorkerCapabilities
from gpu_node.shell.worker_host.packages import watch_packages
from gpu_node.shell.worker_host.sandbox import worker_sandbox
from gpu_node.shell.worker_host.spare import SpareWorker
from gpu_node.shell.worker_host.staging import Stage
from gpu_node.shell.worker_host.supervision import WorkerSupervisor
from gpu_node.shell.worker_host.worker_process import WorkerLaunch
from hypergpu.assignment import AnyAssignment, Assignment, FailureCause, PackedAssignment
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.keys import Passphrase
from hypergpu.privacy import public_environment
from hypergpu.process import memory_of
from hypergpu.sandbox.sandbox import Sandbox, worker_environment
from hypergpu.units import Bytes, Milliseconds
from hypergpu.wire.credentials import Token
from hypergpu.workloads.public_data import FETCH_MODULE, PublicDatasets

log = structlog.get_logger()

_TRANSIENT = frozenset(
    {Reason.COORDINATOR_UNREACHABLE, Reason.NOT_READY, Reason.RATE_LIMITED, Reason.CALL_BROKEN}
)
"""Errors of a join after which the next try may succeed."""


class Daemon:
    """One daemon over one state folder, whose lock the caller holds."""

    def __init__(
        self,
        settings: NodeSettings,
        paths: StatePaths,
        *,
        token: Token | None = None,
        passphrase: Passphrase | None = None,
        log_file: Path | None = None,
        limits: OwnerLimits | None = None,
    ) -> None:
        self._limits = limits = limits or OwnerLimits()
        self._settings = settings = limited_settings(settings, limits)
        self._paths = paths
        self._name = node_name(paths, settings.name)
        self._token = token
        self._python = python = worker_python(settings, paths.root, self._limits.gpu)
        self._identity = identity = identity_key(paths, passphrase)
        self._event_queue = EventQueue()
        self._access = Access(
            paths,
            identity,
            timeout_ms=Milliseconds(settings.call_timeout_ms),
            congestion_control=settings.congestion_control,
            rates=bulk_rates(limits),
        )
        receipts = ReceiptKeeper(paths, identity.node_id)
        prober = Prober(probe_intervals(settings))
        self._stream = CoordinatorStream(self._access, receipts, self._event_queue, prober=prober)
        self._count_signing = CountSigning(identity, receipts, self._stream)
        self._stage = Stage(paths, self._clean_homes)
        self._sandbox = worker_sandbox(paths, settings, limits, python.folders)
        self._worker, self._spare, self._work_calls = self._supervised_worker()
        self._phases = PhaseClock()
        self._uploader = Uploader(paths, identity, prober.measurements, receipts, self._phases)
        cache = BlobCache(paths, Bytes(settings.cache_bytes))
        self._public_datasets = PublicDatasets(python.program(FETCH_MODULE))
        self._gate = OwnerGate(limits, paths, cache, self._sandbox.kind)
        timeouts = stall_timeouts(settings)
        models = InitialModels(cache, self._worker, self._stage, timeouts.first_ms)
        self._transfers = TransferTasks(
            self._stream, cache, self._uploader, models, self._event_queue, paths=paths
        )
        self._stream.capabilities.name = self._name
        self.reporter = Reporter(paths, settings, self._stream, self._transfers, log_file=log_file)
        """Tells commands on this machine how the node does."""
        self._timers: dict[events.Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._session = NodeSession(
            node=identity.node_id,
            memory=load_memory(paths),
            drain_limit_ms=Milliseconds(settings.drain_limit_ms),
            reconnect_cap_ms=Milliseconds(settings.reconnect_cap_ms),
            stall_timeouts=timeouts,
        )

    def _clean_homes(self) -> tuple[str, ...]:
        return self._worker.clean_homes()

    @cached_property
    def _capability_offer(self) -> CapabilityOffer:
        return CapabilityOffer(
            self._name, self._settings, self._limits, self._gate, self._sandbox.text
        )

    def _supervised_worker(self) -> tuple[WorkerSupervisor, SpareWorker, WorkCalls]:
        """The worker, the one in reserve, which have a home each, and what passes calls on."""
        spare = SpareWorker(self._spare_refusal)
        second = self._launch(self._sandbox.with_home(self._paths.second_scratch))
        worker = WorkerSupervisor(
            self._launch(self._sandbox),
            report=self._event_queue.put,
            report_progress=lambda progress: self._stream.send(progress_message(progress)),
            launch_of=self._launch_of,
            spares=(spare, second) if self._settings.worker_spares else None,
        )
        return worker, spare, WorkCalls(worker, self._stream, self._stage, lambda: self._transfers)

    def _launch(self, sandbox: Sandbox) -> WorkerLaunch:
        """How a worker is started in a sandbox."""
        command = self._python.command(self._settings.worker_module)
        variables = public_environment() | worker_variables(self._settings, self._limits)
        home = str(sandbox.folders.writable[0])
        return WorkerLaunch(sandbox.command(command), sandbox.environment(variables), home)

    def _spare_refusal(self) -> str:
        """Why the node keeps no spare worker now; empty: it may. Blocks."""
        worker, spare = self._worker.process_id, self._spare.process_id
        limit = self._settings.worker_memory_bytes
        refusal_with = partial(
            spare_refusal,
            limit_bytes=limit,
            # A look at all processes of the machine takes milliseconds: only where it decides.
            worker_bytes=memory_of(worker) if worker and limit else 0,
        )
        available = psutil.virtual_memory().available
        refusal = refusal_with(available_bytes=available)
        if refusal and spare:
            return refusal_with(available_bytes=available + memory_of(spare))
        return refusal

    def _launch_of(self, job_id: JobId) -> WorkerLaunch | None:
        """How the worker is started of a job that trains on a folder of this machine's, or whose
        calls the owner's server answers.
        """
        if (server := self._gate.server_of(job_id)) is not None:
            command = (*self._python.program(OWN_SERVER_MODULE), "--kind", "null")
            return WorkerLaunch(
                command, worker_environment(os.environ) | own_server_variables(server)
            )
        folder = self._gate.data_folder(job_id)
        return None if folder is None else self._launch(self._sandbox.with_readable(folder))

    @property
    def _start_limit_s(self) -> float:
        """Time in which a worker has to be ready."""
        return self._settings.first_progress_limit_ms / 1000

    @property
    def session(self) -> NodeSession:
        """The state of the node's core."""
        return self._session

    @property
    def worker_process_id(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return self._worker.process_id

    def drain(self, reason: str) -> None:
        """Finish or hand back, then leave."""
        self._event_queue.put(events.DrainRequested(at_ms=monotonic_ms(), reason=reason))

    def stop(self, reason: str) -> None:
        """Leave now."""
        self._event_queue.put(events.StopRequested(at_ms=monotonic_ms(), reason=reason))

    async def join(self) -> JoinedCoordinator:
        """Trade the token for a certificate, and nothing else.

        Raises:
            HyperGPUError: It did not succeed, with the reason.
        """
        try:
            self._set_capabilities(await self._learn_capabilities())
            return await self._join()
        finally:
            await self._worker.stop()

    async def run(self, capabilities: WorkerCapabilities | None = None) -> commands.Leave:
        """Serve until the node leaves.

        Args:
            capabilities: The worker's, where they are known; the worker is then spawned at the
                first training only.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it never got ready on the first start.
        """
        async with self.reporter:
            return await self._run(capabilities)

    async def _run(self, capabilities: WorkerCapabilities | None) -> commands.Leave:
        try:
            await asyncio.to_thread(self._stage.clear)
            await asyncio.to_thread(self._paths.delete_other_jobs, self._session.memory.jobs)
            self._start_task(watch_owner(self._limits, self._change_availability))
            worker = self._worker
            self._start_task(
                watch_worker(
                    self._limits,
                    lambda: worker.process_id,
                    self._gate.kept_bytes,
                    worker.end_worker,
                    spare=self._spare,
                )
            )
            self._start_task(watch_packages(worker, self._offer, self._start_limit_s))
            earlier = await asyncio.to_thread(load_capabilities, self._paths, self._python.kind)
            if capabilities is None and earlier is not None:
                self._stream.note_worker_starting()
                self._start_task(self._warm_up(earlier))
            self._set_capabilities(capabilities or earlier or await self._learn_capabilities())
            # A node that has joined before joins again where a token is given.
            has_certificate = self._token is None and self._access.is_joined
            self._event_queue.put(
                events.Started(at_ms=monotonic_ms(), has_certificate=has_certificate)
            )
            while (leave := await self._advance(await self._event_queue.next())) is None:
                pass
            return leave
        finally:
            await self._close()

    def _set_capabilities(self, capabilities: WorkerCapabilities) -> None:
        warn_of_hidden_gpu(capabilities, self._limits)
        self._stream.capabilities = self._capability_offer.message(capabilities)

    async def _learn_capabilities(self, limit_s: float | None = None) -> WorkerCapabilities:
        """The worker's capabilities, from the worker itself."""
        capabilities = await self._worker.capabilities(limit_s)
        await asyncio.to_thread(save_capabilities, self._paths, capabilities)
        return capabilities

    async def _warm_up(self, known: WorkerCapabilities) -> None:
        """Start the worker while the node dials in with its capabilities of the last time.

        Torch takes so long to load that a node that came back would be given up before it is ready.
        A start that hangs is ended; the session then starts the worker again for work.
        """
        try:
            new_capabilities = await self._learn_capabilities(self._start_limit_s)
        except HyperGPUError as error:
            log.warning("the worker will be started again", reason=error.detail)
            new_capabilities = known
        if new_capabilities == known:
            self._stream.note_worker_ready()
        else:
            await self._offer(new_capabilities)

    async def _offer(self, found: WorkerCapabilities) -> None:
        """Tell the coordinator what a worker has that was started anew."""
        await asyncio.to_thread(save_capabilities, self._paths, found)
        self._stream.offer(self._capability_offer.message(found))

    async def _advance(self, event: events.NodeEvent) -> commands.Leave | None:
        """Decide, persist, act."""
        before = self._session
        step = transition(before, event)
        self._session, todo = step
        self.reporter.advance(before, event, step)
        log_step(event, todo)
        if isinstance(event, events.Connected):
            self._work_calls.begin_stream()
        self._note_phase(event, todo)
        if self._session.memory != before.memory:
            await asyncio.to_thread(save_memory, self._paths, self._session.memory)
        for command in todo:
            if isinstance(command, commands.Leave):
                return command
            await self._perform(command)
        return None

    def _note_phase(self, event: events.NodeEvent, todo: tuple[commands.NodeCommand, ...]) -> None:
        """Tell the coordinator a phase that begins, and the one that lasts to one that is back."""
        before, work = self._phases.newest, self._session.work
        self._phases.note_step(event, SessionStep(self._session, todo))
        newest = self._phases.newest
        is_news = newest != before or isinstance(event, events.Connected)
        if is_news and newest is not None and not isinstance(work, session_state.Idle):
            lease, phase = newest
            if work.assignment.lease == lease:
                self._stream.send(phase_message(work, phase))

    async def _perform(self, command: commands.NodeCommand) -> None:
        match command:
            case commands.Join():
                self._start_task(self._report_join())
            case commands.SetTimer(timer=timer, at_ms=at_ms):
                self._set_timer(timer, at_ms)
            case commands.DeleteJobState(job_id=job_id):
                await asyncio.to_thread(self._paths.delete_job, job_id)
            case commands.StartTraining() | commands.PerformWork():
                await self._compute(command)
            case commands.AbortTraining(lease=lease):
                self._worker.abort(lease)
            case commands.StartWorker():
                await self._worker.start_worker()
            case commands.EndWorker(reason=reason, cause=cause):
                self._worker.end_worker(reason, cause)
            case _:
                await self._perform_transfer(command)

    async def _perform_transfer(self, command: commands.NodeCommand) -> None:
        match command:
            case commands.OpenLink(working=leases):
                self._stream.open(leases)
            case commands.FetchInputs(assignment=assignment):
                await self._fetch(assignment)
            case commands.SendUpdate():
                self._transfers.upload(command)
            case commands.SendResult():
                self._transfers.contribute(command)
            case commands.StopTransfer(lease=lease):
                self._transfers.stop(lease)
            case _:
                if (message := command_message(command)) is not None:
                    self._stream.send(message)

    async def _fetch(self, assignment: AnyAssignment) -> None:
        """Fetch the inputs of work that the owner's limits allow."""
        refusal = await asyncio.to_thread(self._gate.refusal, assignment)
        if refusal is not None:
            self._reject(assignment, str(refusal_error(refusal)), FailureCause.OWNER)
        elif isinstance(assignment, Assignment) and self._lacks_dataset(assignment):
            self._start_task(self._fetch_all(assignment))
        else:
            self._transfers.fetch(assignment, self._session.leases)

    def _lacks_dataset(self, assignment: Assignment) -> bool:
        """Whether the workload's own dataset is to be fetched first."""
        task = assignment.task
        return not task.manifest and bool(self._public_datasets.missing(task.workload))

    async def _fetch_all(self, assignment: Assignment) -> None:
        """Fetch the workload's own dataset, then the inputs."""
        try:
            await self._public_datasets.fetch(assignment.task.workload)
        except HyperGPUError as error:
            self._reject(assignment, error.message, cause_of(error.reason))
        else:
            self._transfers.fetch(assignment, self._session.leases)

    def _reject(self, assignment: AnyAssignment, reason: str, cause: FailureCause) -> None:
        at_ms, lease = monotonic_ms(), assignment.lease
        self._event_queue.put(
            events.FetchRejected(at_ms=at_ms, lease=lease, reason=reason, cause=cause)
        )

    def _change_availability(self, reason: str) -> None:
        self._event_queue.put(events.AvailabilityChanged(at_ms=monotonic_ms(), reason=reason))

    async def _compute(self, command: commands.StartTraining | commands.PerformWork) -> None:
        if isinstance(command, commands.StartTraining):
            return await self._train(command)
        return await self._execute(command.assignment)

    async def _execute(self, assignment: PackedAssignment) -> None:
        lease, job_id = assignment.lease, assignment.lease.job_id
        blobs = self._transfers.blobs[lease]
        await self._worker.begin_job(job_id)
        await asyncio.to_thread(self._stage.open_job, job_id)
        input_dir = await asyncio.to_thread(self._stage.blobs, blobs)
        unsent_lease = self._session.unsent_lease
        output_dir = await asyncio.to_thread(self._paths.open_results, job_id, unsent_lease)
        ring_key = ring_key_for(self._identity, assignment)
        request = DoWork(lease, assignment.work, str(input_dir), str(output_dir), ring_key)
        await self._worker.compute(request)

    async def _train(self, command: commands.StartTraining) -> None:
        assignment = command.assignment
        job_id, round_number = assignment.lease.job_id, assignment.lease.round
        inputs = self._transfers.inputs[assignment.lease]
        await self._worker.begin_job(job_id)
        await asyncio.to_thread(self._stage.open_job, job_id)
        await asyncio.to_thread(self._paths.delete_unfinished, job_id, command.kept_rounds)
        dataset = await asyncio.to_thread(self._stage.dataset, inputs.dataset)
        own = self._gate.data_folder(job_id)
        if bool(assignment.task.data_name) != (own is not None):
            raise AssertionError("the gate lets no work through whose data it has not seen")
        request = TrainShard(
            assignment=assignment,
            start=command.start,
            model_path=str(await asyncio.to_thread(self._stage.model, inputs.model)),
            data_dir="" if dataset is None else str(dataset),
            node_dir="" if own is None else str(own),
            state_dir=str(self._paths.job(job_id)),
            update_path=str(self._paths.update(job_id, round_number)),
        )
        await self._worker.compute(request)

    async def _join(self) -> JoinedCoordinator:
        if self._token is None:
            raise HyperGPUError(Reason.NODE_NOT_JOINED, f"{self._paths.root} holds no certificate")
        return await self._access.join(self._token, self._stream.capabilities)

    async def _report_join(self) -> None:
        try:
            await self._join()
        except HyperGPUError as error:
            event_type = events.JoinFailed if error.reason in _TRANSIENT else events.JoinRejected
            self._event_queue.put(event_type(at_ms=monotonic_ms(), reason=str(error)))
        else:
            self._event_queue.put(events.Joined(at_ms=monotonic_ms()))

    def _start_task(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._event_queue.check_task)

    def _set_timer(self, timer: events.Timer, at_ms: Milliseconds) -> None:
        before = self._timers.pop(timer, None)
        if before is not None:
            before.cancel()
        delay_s = max(0, at_ms - monotonic_ms()) / 1000
        loop = asyncio.get_running_loop()
        self._timers[timer] = loop.call_later(delay_s, self._fire, timer, at_ms)

    def _fire(self, timer: events.Timer, at_ms: Milliseconds) -> None:
        # The loop's clock may run a little ahead of the clock of deadlines.
        now_ms = max(monotonic_ms(), at_ms)
        self._event_queue.put(events.TimerFired(at_ms=now_ms, timer=timer))

    async def _close(self) -> None:
        for handle in self._timers.values():
            handle.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await self._work_calls.close()
        await self._transfers.close()
        await self._count_signing.close()
        await asyncio.gather(self._stream.close(), self._worker.stop())
        await asyncio.to_thread(self._stage.clear)
        await asyncio.to_thread(self._access.restore_route)
