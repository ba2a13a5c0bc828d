"""Starts each command's effect. Every branch returns at once; long work runs as a task."""

import asyncio
from typing import assert_never

import structlog

from coordinator.core.training.evaluation_steps import needs_evaluator
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
from coordinator.core.training.job.events import DeadlineReached, Event
from coordinator.core.training.job.state import ENDED
from coordinator.core.work.work_commands import ReleaseNode, WriteRecord
from coordinator.shell import translate
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.kinds.performing import start
from coordinator.shell.kinds.training.aggregation import aggregate
from coordinator.shell.kinds.training.evaluation import evaluate, failed_evaluation
from coordinator.shell.kinds.training.planning import plan
from coordinator.shell.kinds.training.preparation import initialise
from coordinator.shell.kinds.training.weighing import prepare_gradient
from coordinator.shell.services import Services
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import assignment_message

log = structlog.get_logger()


EVALUATE = "evaluate"


def perform_training(  # noqa: C901  one branch a command
    services: Services, runtime: JobRuntime, command: Command
) -> None:
    """Start a command of a training job and return at once."""
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
            key, work = (EVALUATE, command.round), evaluate(services, runtime, command)
        case _:
            assert_never(command)
    return start(services, runtime, key, work)


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
        start(services, runtime, ("deadline", command.at_ms), work)

    left_s = max(0, command.at_ms - runtime.now_ms()) / 1000 + 0.001
    runtime.deadline_timer = asyncio.get_running_loop().call_later(left_s, report)


def failed_without(command: str, number: int, why: str) -> Event | None:
    """The event by which a job goes on without a command that broke too often: it may lack an
    evaluation; None: there is none.
    """
    return failed_evaluation(number, why) if command == EVALUATE else None


def note_time(services: Services, runtime: JobRuntime, command: str, took_ms: Milliseconds) -> None:
    """Keep how long a command took, for forecasts of jobs of the same size."""
    if runtime.layout is not None:
        services.driver.command_times.note(command, runtime.layout.model_bytes, took_ms)


def end_drain(services: Services, runtime: JobRuntime) -> None:
    """Let nodes and evaluators go that an ended job has no use for."""
    if runtime.job.phase in ENDED:
        release_members(services, runtime)
    if not needs_evaluator(runtime.job):
        services.evaluator.end_job(runtime.job.job_id)
