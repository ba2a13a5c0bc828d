"""Commands whose answers a job still waits for: with them a restarted coordinator goes on."""

from coordinator.core.training.assignment import assignment, deadline, is_done, plan_request
from coordinator.core.training.folding import aggregate
from coordinator.core.training.job.commands import (
    Command,
    EvaluateModel,
    InitialiseModel,
    PlanRound,
)
from coordinator.core.training.job.state import Job, Model, Phase


def outstanding(job: Job) -> tuple[Command, ...]:
    """Commands whose answers the job still waits for.

    Performing them again is safe: they are keyed by round and node, and the same state gives the
    same commands. While the current model is damaged nothing else can be done than to make it
    again.
    """
    if job.lost_model:
        return (remake(job),)
    evaluations = (evaluation_command(job, model) for model in job.evaluating)
    long = (assignment(job, node) for node, each in job.long_leases.items() if each.is_open)
    return (*_phase_commands(job), *long, *evaluations)


def evaluation_command(job: Job, model: Model) -> EvaluateModel:
    """The command that measures a model: the first, the last and one whose target is to be
    confirmed on all held-out samples.
    """
    is_last = model.round == job.newest_model.round and is_done(job)
    is_end = is_last or model.round in {0, *job.evaluating_whole}
    samples_most = 0 if is_end else job.spec.evaluation.samples
    return EvaluateModel(model.round, model, job.spec, job.manifest, samples_most)


def initialise_model(job: Job) -> InitialiseModel:
    """The command that makes the first model."""
    return InitialiseModel(job.job_id, job.spec, job.manifest, job.weights)


def remake(job: Job) -> Command:
    """The command that makes the current model, from the model and updates before it if any."""
    if job.previous is None or job.closed is None:
        return initialise_model(job)
    return aggregate(job, job.closed, job.previous)


def _phase_commands(job: Job) -> tuple[Command, ...]:
    if job.active_phase is Phase.PREPARING:
        return (remake(job),)
    if job.active_phase is Phase.AGGREGATING:
        return (aggregate(job, job.open_round, job.newest_model),)
    if job.phase is Phase.PLANNING:
        return (PlanRound(plan_request(job)),)
    if job.phase is Phase.TRAINING:
        return (*deadline(job), *(assignment(job, node) for node in job.open_round.pending))
    return ()
