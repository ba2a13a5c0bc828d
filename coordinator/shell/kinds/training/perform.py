"""Starts each command's effect. Every branch returns at once; long work runs as a task."""

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
from coordinator.shell.driver.kinds import WorkPerformer
from coordinator.shell.kinds.performers.resources import WorkResources
from coordinator.shell.kinds.training.aggregation import Aggregation
from coordinator.shell.kinds.training.command_times import CommandTimes
from coordinator.shell.kinds.training.evaluation import ModelEvaluation, failed_evaluation
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.model_delivery import ModelDelivery
from coordinator.shell.kinds.training.planning import RoundPlanning
from coordinator.shell.kinds.training.preparation import ModelPreparation
from coordinator.shell.kinds.training.recovery import JobRecovery
from coordinator.shell.kinds.training.weighing import UpdateWeighing
from coordinator.shell.store.blobs.writing import kept_secret
from hypergpu.units import Milliseconds

log = structlog.get_logger()


AGGREGATE, EVALUATE = "aggregate", "evaluate"
_SECRET = "sketches.secret"


class TrainingPerformer(WorkPerformer):
    """Carries out what training jobs have commanded."""

    def __init__(self, resources: WorkResources) -> None:
        """Make what performs each command, of what it uses."""
        performing, storage, fleet = resources.performing, resources.storage, resources.fleet
        self.driver = driver = performing.driver
        self.performing = performing
        self.storage = storage
        self.fleet = fleet
        self.evaluators = evaluators = resources.evaluators
        self.command_times = CommandTimes()
        """Times of commands that were carried out."""
        settings = resources.settings
        secret = kept_secret(settings.data_dir / _SECRET)
        self.weighing = UpdateWeighing(storage, evaluators, resources.heavy, secret)
        self.preparation = ModelPreparation(
            driver, storage, fleet.allocator, evaluators, shares_layouts=settings.takeover
        )
        self.planning = RoundPlanning(driver, fleet, settings)
        self.delivery = ModelDelivery(storage, fleet)
        self.aggregation = Aggregation(driver, storage, resources.heavy, self.weighing)
        self.evaluation = ModelEvaluation(driver, storage, evaluators)
        grace_ms = Milliseconds(settings.reconnect_grace_ms)
        self.recovery = JobRecovery(
            performing, storage, fleet, self.preparation, self.weighing, grace_ms
        )

    def perform(self, runtime: JobRuntime, command: Command) -> None:  # noqa: C901
        """Start a command of a training job and return at once: one branch a command."""
        match command:
            case AssignShard():
                return self.assign(runtime, command)
            case CancelShard():
                message = translate.cancel_message(runtime.job.job_id, command)
                return self.fleet.nodes.send(command.node, message)
            case ReleaseNode():
                return self.fleet.allocator.review()
            case SetDeadline():
                return self.set_deadline(runtime, command)
            case WriteRecord():
                return None  # The driver journals it with the event that caused it.
            case InitialiseModel():
                key, work = ("initialise", 0), self._initialise(runtime, command)
            case PlanRound():
                # A plan that came to nothing is asked for again while its task is still ending.
                key, work = ("plan", runtime.next_sequence), self.planning.plan(runtime, command)
            case Aggregate():
                key, work = (AGGREGATE, command.round), self.aggregation.aggregate(runtime, command)
            case EvaluateModel():
                key, work = (EVALUATE, command.round), self.evaluation.evaluate(runtime, command)
            case _:
                assert_never(command)
        return self.performing.start(runtime, key, work)

    async def take_up(self, runtime: JobRuntime) -> None:
        """Check a job's files and go on with it, after a start of this process."""
        await self.recovery.take_up(runtime)

    async def _initialise(self, runtime: JobRuntime, command: InitialiseModel) -> None:
        await self.preparation.initialise(runtime, command)
        self.weighing.prepare_gradient(runtime)

    def assign(self, runtime: JobRuntime, command: AssignShard) -> None:
        """Tell a participant its work, if it is connected: else it is told when it dials in."""
        self.weighing.prepare_own(runtime)
        if (stream := self.fleet.nodes.streams.get(command.node)) is not None:
            self.delivery.send(runtime, stream, command.assignment_at(runtime.now_ms()))

    def release_members(self, runtime: JobRuntime) -> None:
        """Tell every node that ever worked for an ended job to delete what it keeps for it."""
        if runtime.job.phase not in ENDED:
            return
        message = translate.release_message(runtime.job.job_id, runtime.job.reason)
        for node in runtime.job.members:
            self.fleet.nodes.send(node, message)

    def set_deadline(self, runtime: JobRuntime, command: SetDeadline) -> None:
        """Report the deadline when it comes. A job has one: a new one replaces the old."""
        event = DeadlineReached(at_ms=Milliseconds(0), round=command.round)
        self.performing.report_at(runtime, command.at_ms, event)

    def after_command(self, runtime: JobRuntime, command: str, took_ms: Milliseconds) -> None:
        """Keep how long a command took, for forecasts of jobs of the same size."""
        if runtime.layout is not None:
            self.command_times.note(command, runtime.layout.model_bytes, took_ms)

    def after_drain(self, runtime: JobRuntime) -> None:
        """Let nodes and evaluators go that an ended job has no use for."""
        if runtime.job.phase in ENDED:
            self.release_members(runtime)
        if not needs_evaluator(runtime.job):
            self.evaluators.end_job(runtime.job.job_id)


def failed_without(command: str, number: int, why: str) -> Event | None:
    """The event by which a job goes on without a command that broke too often: it may lack an
    evaluation; None: there is none.
    """
    return failed_evaluation(number, why) if command == EVALUATE else None
