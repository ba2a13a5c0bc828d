"""Starts each command's effect. Every branch returns at once; long work runs as a task."""

import asyncio
from collections.abc import Coroutine
from typing import assert_never

import structlog

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
from coordinator.core.training.job.events import DeadlineReached
from coordinator.core.training.job.state import ENDED, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.work.work_commands import ReleaseNode, WriteRecord
from coordinator.core.work.work_events import JobPaused
from coordinator.shell import translate
from coordinator.shell.commands.aggregation import aggregate
from coordinator.shell.commands.evaluation import evaluate, failed_evaluation
from coordinator.shell.commands.planning import plan
from coordinator.shell.commands.preparation import initialise
from coordinator.shell.commands.weighing import prepare_gradient
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.clock import monotonic_ms
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import assignment_message

log = structlog.get_logger()


_EVALUATE = "evaluate"
_TRIES = 4
_PAUSES_S = (0.5, 2.0, 10.0)
_LONG_PAUSE_S = 60.0


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
