"""Commands to effects. Every branch returns at once; what takes long runs as a task of its own."""

import asyncio
from collections.abc import Coroutine
from typing import assert_never

import structlog

from coordinator.core.job.commands import (
    Aggregate,
    AssignShard,
    CancelShard,
    Command,
    EvaluateModel,
    InitialiseModel,
    JudgeUpdates,
    PlanRound,
    ReleaseNode,
    SetDeadline,
    WriteRecord,
)
from coordinator.core.job.events import DeadlineReached, EvaluationFailed, JobPaused, UpdatesJudged
from coordinator.core.job.state import ENDED, Phase
from coordinator.core.round.outstanding import outstanding
from coordinator.shell import translate
from coordinator.shell.commands.aggregation import aggregate
from coordinator.shell.commands.evaluation import evaluate
from coordinator.shell.commands.judging import judge
from coordinator.shell.commands.planning import plan
from coordinator.shell.commands.preparation import initialise
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import assignment_message

log = structlog.get_logger()


_EVALUATE = "evaluate"
_JUDGE = "judge"
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
        _mend(services, runtime, key, broken)
    else:
        runtime.breaks.pop(key, None)


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


def begin_again(services: Services, runtime: JobRuntime) -> None:
    """After a resume: try what could not be done before the coordinator paused the job."""
    if not runtime.is_given_up:
        return
    runtime.is_given_up = False
    runtime.breaks.clear()
    perform_outstanding(services, runtime)


def _perform(  # noqa: C901  one branch a command
    services: Services, runtime: JobRuntime, command: Command
) -> None:
    job_id = runtime.job.job_id
    match command:
        case AssignShard():
            assign(services, runtime, command)
        case CancelShard():
            services.nodes.send(command.node, translate.cancel_message(job_id, command))
        case ReleaseNode():
            services.allocator.review()
        case SetDeadline():
            set_deadline(services, runtime, command)
        case InitialiseModel():
            _start(services, runtime, ("initialise", 0), initialise(services, runtime, command))
        case PlanRound():
            # A plan that came to nothing is asked for again while its task is still ending.
            _start(
                services, runtime, ("plan", runtime.next_sequence), plan(services, runtime, command)
            )
        case Aggregate():
            _start(
                services,
                runtime,
                ("aggregate", command.round),
                aggregate(services, runtime, command),
            )
        case EvaluateModel():
            _start(
                services, runtime, (_EVALUATE, command.round), evaluate(services, runtime, command)
            )
        case JudgeUpdates():
            _start(services, runtime, (_JUDGE, command.round), judge(services, runtime, command))
        case WriteRecord():
            pass  # The driver journals it with the event that caused it.
        case _:
            assert_never(command)


def assign(services: Services, runtime: JobRuntime, command: AssignShard) -> None:
    """Tell a participant its work, if it is connected."""
    message = assignment_message(command.assignment_at(runtime.now_ms()))
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
    if runtime.deadline is not None:
        runtime.deadline.cancel()

    def report() -> None:
        if (
            runtime.now_ms() < command.at_ms
        ):  # Timers may fire a little early, and job time is coarser.
            set_deadline(services, runtime, command)
            return
        event = DeadlineReached(at_ms=Milliseconds(0), round=command.round)
        _start(services, runtime, ("deadline", command.round), _insist(services, runtime, event))

    left_s = max(0, command.at_ms - runtime.now_ms()) / 1000 + 0.001
    runtime.deadline = asyncio.get_running_loop().call_later(left_s, report)


async def _insist(services: Services, runtime: JobRuntime, event: DeadlineReached) -> None:
    await services.driver.insist(runtime.job.job_id, event)


def _start(
    services: Services,
    runtime: JobRuntime,
    key: tuple[str, int],
    work: Coroutine[object, object, None],
) -> None:
    """Run a long command unless the same one is under way."""
    if key in runtime.tasks:
        work.close()
        return
    task = asyncio.create_task(work, name=f"{runtime.job.job_id} {key[0]} {key[1]}")
    runtime.tasks[key] = task

    def ended(task: "asyncio.Task[None]") -> None:
        runtime.tasks.pop(key, None)
        if task.cancelled():
            return
        broken = task.exception()
        if broken is None:
            runtime.breaks.pop(key, None)
            return
        _mend(services, runtime, key, broken)
        log.error("a command broke", task=task.get_name(), exc_info=broken)

    task.add_done_callback(ended)


def _mend(
    services: Services, runtime: JobRuntime, key: tuple[str, int], broken: BaseException
) -> None:
    """Perform what is outstanding again after a while, or give up when that went on too long."""
    runtime.breaks[key] += 1
    tries = runtime.breaks[key]
    if tries == _TRIES:
        why = f"{key[0]} broke {tries} times, the last time by {type(broken).__name__}: {broken}"
        _start(services, runtime, ("give up", key[1]), _give_up(services, runtime, key, why))
    else:
        _try_later(services, runtime, _PAUSES_S[tries - 1] if tries < _TRIES else _LONG_PAUSE_S)


async def _give_up(services: Services, runtime: JobRuntime, key: tuple[str, int], why: str) -> None:
    """Let a job go on without a measurement, and pause it for anything else."""
    if key[0] == _EVALUATE:
        event = EvaluationFailed(at_ms=Milliseconds(0), round=key[1], reason=why)
        refused = await services.driver.insist(runtime.job.job_id, event)
    elif key[0] == _JUDGE:
        judged = UpdatesJudged(at_ms=Milliseconds(0), round=key[1], reason=why)
        refused = await services.driver.insist(runtime.job.job_id, judged)
    else:
        refused = await pause(services, runtime, why)
    if refused:
        _try_later(services, runtime, _LONG_PAUSE_S)


def _try_later(services: Services, runtime: JobRuntime, pause_s: float) -> None:
    if runtime.retry is not None:
        runtime.retry.cancel()
    runtime.retry = asyncio.get_running_loop().call_later(
        pause_s, perform_outstanding, services, runtime
    )
