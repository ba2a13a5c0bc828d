"""What is still to be done for a job, whatever was done before: how a restarted coordinator goes
on.
"""

from coordinator.core.job.commands import (
    Command,
    EvaluateModel,
    InitialiseModel,
    PlanRound,
)
from coordinator.core.job.state import Job, Phase, WorkState
from coordinator.core.quality.judging import judging_commands
from coordinator.core.round.completion import plan_request
from coordinator.core.round.folding import aggregate, fold_command
from coordinator.core.round.rounds import assignment, deadline


def outstanding(job: Job) -> tuple[Command, ...]:
    """Commands whose answers the job still waits for.

    Performing them again is safe: they are keyed by round and node, and the same state gives the
    same commands. While the current model is damaged nothing else can be done than to make it
    again.
    """
    if job.lost_model:
        return (remake(job),)
    return (*_phase_commands(job), *_evaluations(job), *judging_commands(job))


def remake(job: Job) -> Command:
    """The command that makes a lost current model again from what it was made of."""
    if job.previous is None or job.closed is None:
        return InitialiseModel(job.job_id, job.spec, job.manifest)
    return fold_command(job.closed, job.previous)


def _phase_commands(job: Job) -> tuple[Command, ...]:
    if Phase.PREPARING in (job.phase, job.resume_to):
        return (InitialiseModel(job.job_id, job.spec, job.manifest),)
    if Phase.AGGREGATING in (job.phase, job.resume_to):
        return (aggregate(job),)
    if job.phase is Phase.PLANNING:
        return (PlanRound(plan_request(job)),)
    if job.phase is Phase.TRAINING and job.round is not None:
        pending = [
            node
            for node, participant in job.round.participants.items()
            if participant.work is WorkState.PENDING
        ]
        return (*deadline(job), *(assignment(job, node) for node in pending))
    return ()


def _evaluations(job: Job) -> tuple[Command, ...]:
    return tuple(
        EvaluateModel(model.round, model, job.spec, job.manifest) for model in job.evaluating
    )
