"""Starts each command's effect, and after a start those that are outstanding. Every branch returns
at once; long work runs as a task.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import assert_never

import structlog
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.commands import (
    Aggregate,
    AssignShard,
    CancelShard,
    Command,
    EvaluateModel,
    InitialiseModel,
    PlanRound,
    SetDeadline,
)
from coordinator.core.training.job.events import DeadlineReached, RoundPlanned
from coordinator.core.training.job.state import ENDED, Job, Phase
from coordinator.core.training.lifecycle import outstanding
from coordinator.core.training.plan.decision import ModelSizes, PlanRequest
from coordinator.core.training.plan.planning import plan_round
from coordinator.core.training.plan.uploads import payload_bits_per_s
from coordinator.core.work.work_commands import ReleaseNode, WriteRecord
from coordinator.core.work.work_events import CoordinatorChanged, JobPaused
from coordinator.shell import translate
from coordinator.shell.commands.aggregation import aggregate
from coordinator.shell.commands.evaluation import (
    evaluate,
    failed_evaluation,
    initialise,
    load_layout,
    manifest_digests,
    stored_manifest,
)
from coordinator.shell.commands.weighing import prepare_gradient
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.driver import JobRuntime
from coordinator.shell.runtime.fleet_speeds import speed_sources
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import CODECS
from hypergpu.streams import monotonic_ms
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import assignment_message


async def plan(services: Services, runtime: JobRuntime, command: PlanRound) -> None:
    """Answer the command with `RoundPlanned`."""
    paused = services.nodes.pause_reasons(runtime.job.members)
    request = replace(with_line(command.request, services.settings), paused=paused)
    sources = speed_sources(runtime.job, services.nodes.streams, request.candidates)
    readings = services.readings.readings(request.candidates, runtime.now_ms(), sources)
    made = await asyncio.to_thread(plan_round, request, readings, sizes_of(runtime.required_layout))
    event = RoundPlanned(at_ms=Milliseconds(0), plan=made)
    await services.driver.report(runtime.job.job_id, event)


def with_line(request: PlanRequest, settings: Settings) -> PlanRequest:
    """The request with the capacity of this coordinator's line, as its settings state it."""
    line_bits_per_s = payload_bits_per_s(settings.line_mbit_s * 1_000_000)
    return replace(request, line_bits_per_s=line_bits_per_s)


def sizes_of(layout: Layout) -> ModelSizes:
    """Bytes to transfer for a model, by codec."""
    return ModelSizes({codec: update_bytes(layout, codec) for codec in CODECS}, layout.model_bytes)


log = structlog.get_logger()


_EVALUATE = "evaluate"
_TRIES = 4
_PAUSES_S = (0.5, 2.0, 10.0)
_LONG_PAUSE_S = 60.0
_STORE_AGAIN_S = 2.0


def perform(services: Services, runtime: JobRuntime, command: Command) -> None:
    """Start a command. While a job recovers only cancels go out: the rest is still outstanding.

    Whatever breaks here or in what was started concerns this job alone: it is tried again, and
    after a few tries the job is paused with the reason.
    """
    if runtime.is_recovering and not isinstance(command, CancelShard):
        return
    key = (type(command).__name__, 0)
    try:
        _perform(services, runtime, command)
    except Exception as broken:
        log.exception("a command broke", job_id=runtime.job.job_id, command=key[0])
        _retry_or_give_up(services, runtime, key, broken)
    else:
        runtime.failures.pop(key, None)


def perform_outstanding(services: Services, runtime: JobRuntime) -> None:
    """Perform everything whose answer the job still waits for."""
    for command in outstanding(runtime.job):
        perform(services, runtime, command)


async def pause(services: Services, runtime: JobRuntime, why: str) -> str:
    """Pause a job that cannot go on. Returns why that is refused; empty when it is paused."""
    log.error("a job cannot go on and is paused", job_id=runtime.job.job_id, reason=why)
    runtime.is_given_up = True
    event = JobPaused(at_ms=Milliseconds(0), reason=why)
    refused = await services.driver.insist(runtime.job.job_id, event)
    if runtime.job.phase is not Phase.PAUSED:
        runtime.is_given_up = False
    return refused


def retry_after_resume(services: Services, runtime: JobRuntime) -> None:
    """After a resume: perform again the commands for which the coordinator paused the job."""
    if not runtime.is_given_up:
        return
    runtime.is_given_up = False
    runtime.failures.clear()
    perform_outstanding(services, runtime)


def _perform(  # noqa: C901  one branch a command
    services: Services, runtime: JobRuntime, command: Command
) -> None:
    match command:
        case AssignShard():
            return assign(services, runtime, command)
        case CancelShard():
            message = translate.cancel_message(runtime.job.job_id, command)
            return services.nodes.send(command.node, message)
        case ReleaseNode():
            return services.allocator.review()
        case SetDeadline():
            return set_deadline(services, runtime, command)
        case WriteRecord():
            return None  # The driver journals it with the event that caused it.
        case InitialiseModel():
            key, work = ("initialise", 0), _initialise(services, runtime, command)
        case PlanRound():
            # A plan that came to nothing is asked for again while its task is still ending.
            key, work = ("plan", runtime.next_sequence), plan(services, runtime, command)
        case Aggregate():
            key, work = ("aggregate", command.round), aggregate(services, runtime, command)
        case EvaluateModel():
            key, work = (_EVALUATE, command.round), evaluate(services, runtime, command)
        case _:
            assert_never(command)
    return _start(services, runtime, key, work)


async def _initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    await initialise(services, runtime, command)
    prepare_gradient(services, runtime)


def assign(services: Services, runtime: JobRuntime, command: AssignShard) -> None:
    """Tell a participant its work, if it is connected."""
    assignment = command.assignment_at(runtime.now_ms())
    message = assignment_message(assignment)
    job_id, blob = runtime.job.job_id, assignment.newest_blob
    if (ticket := services.bulk.ready_ticket(command.node, blob, job_id)) is not None:
        message.model_ticket.CopyFrom(ticket)
    services.nodes.send(command.node, node_pb2.ControlResponse(assignment=message))


def release_members(services: Services, runtime: JobRuntime) -> None:
    """Tell every node that ever worked for an ended job that it may delete what it keeps for it."""
    if runtime.job.phase not in ENDED:
        return
    message = translate.release_message(runtime.job.job_id, runtime.job.reason)
    for node in runtime.job.members:
        services.nodes.send(node, message)


def set_deadline(services: Services, runtime: JobRuntime, command: SetDeadline) -> None:
    """Report the deadline when it comes. A job has one at a time: a new one replaces the old."""
    if runtime.deadline_timer is not None:
        runtime.deadline_timer.cancel()

    def report() -> None:
        # Timers may fire a little early, and job time is coarser.
        if runtime.now_ms() < command.at_ms:
            set_deadline(services, runtime, command)
            return
        event = DeadlineReached(at_ms=Milliseconds(0), round=command.round)
        work = services.driver.report(runtime.job.job_id, event)
        # The timer before may still be reporting: a round has several, one after the other.
        _start(services, runtime, ("deadline", command.at_ms), work)

    left_s = max(0, command.at_ms - runtime.now_ms()) / 1000 + 0.001
    runtime.deadline_timer = asyncio.get_running_loop().call_later(left_s, report)


def _start(
    services: Services,
    runtime: JobRuntime,
    key: tuple[str, int],
    work: Coroutine[object, object, object],
) -> None:
    """Run a long command unless the same one is under way."""
    if key in runtime.tasks:
        work.close()
        return
    task = asyncio.create_task(work, name=f"{runtime.job.job_id} {key[0]} {key[1]}")
    runtime.tasks[key] = task
    begun_ms = monotonic_ms()

    def check_end(task: "asyncio.Task[object]") -> None:
        runtime.tasks.pop(key, None)
        if task.cancelled():
            return
        broken = task.exception()
        if broken is None:
            runtime.failures.pop(key, None)
            if runtime.layout is not None:
                took_ms = Milliseconds(monotonic_ms() - begun_ms)
                services.driver.command_times.note(key[0], runtime.layout.model_bytes, took_ms)
            return
        _retry_or_give_up(services, runtime, key, broken)
        log.error("a command broke", task=task.get_name(), exc_info=broken)

    task.add_done_callback(check_end)


def _retry_or_give_up(
    services: Services, runtime: JobRuntime, key: tuple[str, int], broken: BaseException
) -> None:
    """Perform what is outstanding again after a while, or give up when that went on too long."""
    runtime.failures[key] += 1
    tries = runtime.failures[key]
    if tries == _TRIES:
        why = f"{key[0]} broke {tries} times, the last time by {type(broken).__name__}: {broken}"
        _start(services, runtime, ("give up", key[1]), _give_up(services, runtime, key, why))
    else:
        _retry_later(services, runtime, _PAUSES_S[tries - 1] if tries < _TRIES else _LONG_PAUSE_S)


async def _give_up(services: Services, runtime: JobRuntime, key: tuple[str, int], why: str) -> None:
    """Let a job go on without a measurement, and pause it for anything else."""
    if key[0] == _EVALUATE:
        refused = await services.driver.insist(runtime.job.job_id, failed_evaluation(key[1], why))
    else:
        refused = await pause(services, runtime, why)
    if refused:
        _retry_later(services, runtime, _LONG_PAUSE_S)


def _retry_later(services: Services, runtime: JobRuntime, pause_s: float) -> None:
    if runtime.retry_timer is not None:
        runtime.retry_timer.cancel()
    runtime.retry_timer = asyncio.get_running_loop().call_later(
        pause_s, perform_outstanding, services, runtime
    )


async def take_up(services: Services, runtime: JobRuntime) -> None:
    """Check a job's files and perform everything that is outstanding, or pause it with the reason.

    The job answers questions meanwhile, and its nodes may dial in; they get their work afterwards.
    """
    is_open = runtime.job.phase not in ENDED
    if is_open:
        present = [node for node, member in runtime.job.members.items() if member.is_present]
        services.nodes.expect(present, Milliseconds(services.settings.reconnect_grace_ms))
        await _tell_restart(services, runtime)
    try:
        damage = await _check_files(services, runtime)
    except Exception as broken:
        why = broken.message if isinstance(broken, HyperGPUError) else repr(broken)
        log.exception("a job cannot be taken up", job_id=runtime.job.job_id)
        damage = ""
        if is_open:
            await pause(services, runtime, f"it cannot go on after the restart: {why}")
    finally:
        runtime.is_recovering = False
    if damage and (model := runtime.job.model):
        await services.driver.report_lost_model(runtime.job.job_id, model.blob.digest, damage)
    if not runtime.is_given_up:
        # Also what a node that missed the model has caused while nothing was performed.
        perform_outstanding(services, runtime)
    if is_open:
        prepare_gradient(services, runtime)
        failpoint("recover.done")
        services.allocator.review()


async def _tell_restart(services: Services, runtime: JobRuntime) -> None:
    """Journal a takeover, and any restart in a round in which nodes may be timed."""
    runtime.takeover = services.journal.database.takeover
    is_timed = runtime.job.round is not None and runtime.job.spec.strategy == "aware"
    if runtime.takeover or is_timed:
        reason = runtime.takeover or "the coordinator was started again"
        changed = CoordinatorChanged(at_ms=Milliseconds(0), reason=reason)
        await services.driver.insist(runtime.job.job_id, changed)


async def _check_files(services: Services, runtime: JobRuntime) -> str:
    """Read the job's files. Returns what is wrong with its model and not reported yet.

    Raises:
        HyperGPUError: Its layout is lost and cannot be made again.
    """
    job = runtime.job
    if job.phase not in ENDED:
        await _bring_blobs(services, runtime, live_blobs(job) | {job.layout})
    if job.manifest is not None:
        try:
            manifest = await asyncio.to_thread(stored_manifest, services.blobs, job.manifest)
            runtime.entries_of_manifest = manifest_digests(manifest)
        except HyperGPUError as missing:
            log.warning("a job's manifest is damaged", job_id=job.job_id, reason=missing.detail)
        if job.phase not in ENDED:
            await _bring_blobs(services, runtime, runtime.entries_of_manifest or ())
    await load_layout(services, runtime)
    if job.phase in ENDED or job.lost_model:
        return ""
    return await asyncio.to_thread(_damage, services, job)


async def _bring_blobs(services: Services, runtime: JobRuntime, digests: Iterable[Digest]) -> None:
    """Fetch what another coordinator left in the object store, however long that is away."""
    while True:
        try:
            with runtime.tell_obstacle():
                return await asyncio.to_thread(services.blobs.bring, digests)
        except HyperGPUError as refused:
            if refused.reason not in {Reason.STORE_UNREACHABLE, Reason.DISK_FULL}:
                raise
            await asyncio.sleep(_STORE_AGAIN_S)


def _damage(services: Services, job: Job) -> str:
    """Damage of the current model's files; empty when they are sound."""
    if job.model is None:
        return ""
    # Older deltas cannot be made again; a node that needs a lost one fetches the whole model.
    for blob in job.model.newest_blobs:
        try:
            services.blobs.path(blob.digest)
        except HyperGPUError as missing:
            return missing.detail
    return ""
