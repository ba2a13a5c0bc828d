"""Commands to effects. Every branch returns at once; what takes long runs as a task of its own."""

import asyncio
from collections.abc import Coroutine
from typing import assert_never

import structlog

from coordinator.core.commands import (
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
from coordinator.core.events import DeadlineReached, EvaluationFailed, JobPaused, UpdatesJudged
from coordinator.core.job import Phase
from coordinator.core.round.outstanding import outstanding
from coordinator.shell import translate
from coordinator.shell.runtime.acts.aggregation import aggregate
from coordinator.shell.runtime.acts.evaluation import evaluate
from coordinator.shell.runtime.acts.judging import judge
from coordinator.shell.runtime.acts.planning import plan
from coordinator.shell.runtime.acts.preparation import initialise
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from hypergpu.units import Milliseconds

log = structlog.get_logger()


_EVALUATE = "evaluate"
_JUDGE = "judge"
_TRIES = 4
_PAUSES_S = (0.5, 2.0, 10.0)
_LONG_PAUSE_S = 60.0


def perform(parts: Parts, room: Room, command: Command) -> None:
    """Start a command. While a job recovers only cancels go out: the rest is still outstanding.

    Whatever breaks here or in what was started concerns this job alone: it is tried again, and
    after a few tries the job is paused with the reason.
    """
    if room.is_recovering and not isinstance(command, CancelShard):
        return
    key = (type(command).__name__, 0)
    try:
        _perform(parts, room, command)
    except Exception as broken:
        log.exception("a command broke", job_id=room.job.job_id, command=key[0])
        _mend(parts, room, key, broken)
    else:
        room.breaks.pop(key, None)


def perform_outstanding(parts: Parts, room: Room) -> None:
    """Perform everything whose answer the job still waits for."""
    for command in outstanding(room.job):
        perform(parts, room, command)


async def pause(parts: Parts, room: Room, why: str) -> str:
    """Pause a job that cannot go on. Returns why that is refused; empty when it is paused."""
    log.error("a job cannot go on and is paused", job_id=room.job.job_id, reason=why)
    room.is_given_up = True
    event = JobPaused(at_ms=Milliseconds(0), reason=why)
    refused = await parts.driver.insist(room.job.job_id, event)
    if room.job.phase is not Phase.PAUSED:
        room.is_given_up = False
    return refused


def begin_again(parts: Parts, room: Room) -> None:
    """After a resume: try what could not be done before the coordinator paused the job."""
    if not room.is_given_up:
        return
    room.is_given_up = False
    room.breaks.clear()
    perform_outstanding(parts, room)


def _perform(  # noqa: C901  one branch a command
    parts: Parts, room: Room, command: Command
) -> None:
    job_id = room.job.job_id
    match command:
        case AssignShard():
            assign(parts, room, command)
        case CancelShard():
            parts.roster.send(command.node, translate.cancel_message(job_id, command))
        case ReleaseNode():
            parts.staffing.review()
        case SetDeadline():
            set_deadline(parts, room, command)
        case InitialiseModel():
            _start(parts, room, ("initialise", 0), initialise(parts, room, command))
        case PlanRound():
            # A plan that came to nothing is asked for again while its task is still ending.
            _start(parts, room, ("plan", room.next_sequence), plan(parts, room, command))
        case Aggregate():
            _start(parts, room, ("aggregate", command.round), aggregate(parts, room, command))
        case EvaluateModel():
            _start(parts, room, (_EVALUATE, command.round), evaluate(parts, room, command))
        case JudgeUpdates():
            _start(parts, room, (_JUDGE, command.round), judge(parts, room, command))
        case WriteRecord():
            pass  # The driver journals it with the event that caused it.
        case _:
            assert_never(command)


def assign(parts: Parts, room: Room, command: AssignShard) -> None:
    """Tell a participant its work, if it is connected."""
    if room.layout is None:
        raise AssertionError("an assignment needs the model's layout")
    message = translate.assignment_message(
        room.job.job_id,
        command,
        layout=room.layout.digest,
        workload_version=room.workload_version,
        now_ms=room.now_ms(),
    )
    parts.roster.send(command.node, message)


def set_deadline(parts: Parts, room: Room, command: SetDeadline) -> None:
    """Report the deadline when it comes. A job has one at a time: a new one replaces the old."""
    if room.deadline is not None:
        room.deadline.cancel()

    def report() -> None:
        if (
            room.now_ms() < command.at_ms
        ):  # Timers may fire a little early, and job time is coarser.
            set_deadline(parts, room, command)
            return
        event = DeadlineReached(at_ms=Milliseconds(0), round=command.round)
        _start(parts, room, ("deadline", command.round), _insist(parts, room, event))

    left_s = max(0, command.at_ms - room.now_ms()) / 1000 + 0.001
    room.deadline = asyncio.get_running_loop().call_later(left_s, report)


async def _insist(parts: Parts, room: Room, event: DeadlineReached) -> None:
    await parts.driver.insist(room.job.job_id, event)


def _start(
    parts: Parts, room: Room, key: tuple[str, int], work: Coroutine[object, object, None]
) -> None:
    """Run a long command unless the same one is under way."""
    if key in room.tasks:
        work.close()
        return
    task = asyncio.create_task(work, name=f"{room.job.job_id} {key[0]} {key[1]}")
    room.tasks[key] = task

    def ended(task: "asyncio.Task[None]") -> None:
        room.tasks.pop(key, None)
        if task.cancelled():
            return
        broken = task.exception()
        if broken is None:
            room.breaks.pop(key, None)
            return
        _mend(parts, room, key, broken)
        log.error("a command broke", task=task.get_name(), exc_info=broken)

    task.add_done_callback(ended)


def _mend(parts: Parts, room: Room, key: tuple[str, int], broken: BaseException) -> None:
    """Perform what is outstanding again after a while, or give up when that went on too long."""
    room.breaks[key] += 1
    tries = room.breaks[key]
    if tries == _TRIES:
        why = f"{key[0]} broke {tries} times, the last time by {type(broken).__name__}: {broken}"
        _start(parts, room, ("give up", key[1]), _give_up(parts, room, key, why))
    else:
        _try_later(parts, room, _PAUSES_S[tries - 1] if tries < _TRIES else _LONG_PAUSE_S)


async def _give_up(parts: Parts, room: Room, key: tuple[str, int], why: str) -> None:
    """Let a job go on without a measurement, and pause it for anything else."""
    if key[0] == _EVALUATE:
        event = EvaluationFailed(at_ms=Milliseconds(0), round=key[1], reason=why)
        refused = await parts.driver.insist(room.job.job_id, event)
    elif key[0] == _JUDGE:
        judged = UpdatesJudged(at_ms=Milliseconds(0), round=key[1], reason=why)
        refused = await parts.driver.insist(room.job.job_id, judged)
    else:
        refused = await pause(parts, room, why)
    if refused:
        _try_later(parts, room, _LONG_PAUSE_S)


def _try_later(parts: Parts, room: Room, pause_s: float) -> None:
    if room.retry is not None:
        room.retry.cancel()
    room.retry = asyncio.get_running_loop().call_later(pause_s, perform_outstanding, parts, room)
