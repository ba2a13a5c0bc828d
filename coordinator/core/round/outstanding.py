"""Commands still to be performed for a job: with them a restarted coordinator goes on."""

from coordinator.core.job.commands import Command, EvaluateModel, InitialiseModel, PlanRound
from coordinator.core.job.state import Job, Phase
from coordinator.core.quality.judging import judging_commands
from coordinator.core.round.assigning import assignment, deadline
from coordinator.core.round.closing import aggregate
from coordinator.core.round.completion import plan_request


def outstanding(job: Job) -> tuple[Command, ...]:
    """Commands whose answers the job still waits for.

    Performing them again is safe: they are keyed by round and node, and the same state gives the
    same commands. While the current model is damaged nothing else can be done than to make it
    again.
    """
    if job.lost_model:
        return (remake(job),)
    evaluations = (
        EvaluateModel(model.round, model, job.spec, job.manifest) for model in job.evaluating
    )
    return (*_phase_commands(job), *evaluations, *judging_commands(job))


def remake(job: Job) -> Command:
    """The command that makes a lost current model again from the model and updates before it."""
    if job.previous is None or job.closed is None:
        return InitialiseModel(job.job_id, job.spec, job.manifest)
    return aggregate(job.closed, job.previous)


def _phase_commands(job: Job) -> tuple[Command, ...]:
    if job.active_phase is Phase.PREPARING:
        return (InitialiseModel(job.job_id, job.spec, job.manifest),)
    if job.active_phase is Phase.AGGREGATING:
        return (aggregate(job.open_round, job.newest_model),)
    if job.phase is Phase.PLANNING:
        return (PlanRound(plan_request(job)),)
    if job.phase is Phase.TRAINING:
        return (*deadline(job), *(assignment(job, node) for node in job.open_round.pending))
    return ()
