"""Events of users, payments and the clock: pause, resume, stop, settings, funding, deadline."""

from msgspec.structs import replace

from coordinator.core.job import events
from coordinator.core.job.commands import Command
from coordinator.core.job.state import Funding, Job, Participant, Phase, Round, WorkState
from coordinator.core.round.assigning import (
    JobStep,
    assignment,
    cancellations,
    deadline,
    reassign_orphans,
    replace_participants,
)
from coordinator.core.round.closing import close_if_due, end_job
from coordinator.core.round.opening import open_round
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def note_deadline(job: Job, _event: events.DeadlineReached) -> JobStep:
    """From here on a quorum is enough."""
    return close_if_due(JobStep(replace(job, round=replace(job.open_round, is_overdue=True))))


def pause_job(job: Job, event: events.JobPaused) -> JobStep:
    """Take pending work back; keep everything that was accepted."""
    is_training = job.phase is Phase.TRAINING
    cancelled = cancellations(job.open_round, "the job was paused") if is_training else ()
    job = replace(
        job,
        phase=Phase.PAUSED,
        resume_to=job.phase,
        paused_at_ms=job.at_ms,
        reason=event.reason or "paused by its user",
    )
    return JobStep(job, cancelled)


def resume_job(job: Job, _event: events.JobResumed) -> JobStep:
    """Go on where the pause came in: the same shards, new leases, the deadline's remaining time."""
    phase = job.active_phase
    job = replace(job, phase=phase, resume_to=None, reason="resumed by its user")
    if phase in (Phase.WAITING, Phase.PLANNING):
        return open_round(job)
    if phase is not Phase.TRAINING:
        return JobStep(job)
    job = _renew_leases(job, job.open_round)
    again = (assignment(job, node) for node in job.open_round.pending)
    renewed: tuple[Command, ...] = (*deadline(job), *again)
    step = reassign_orphans(job)
    return close_if_due(JobStep(step.job, (*renewed, *step.commands)))


def stop_job(job: Job, _event: events.JobStopped) -> JobStep:
    """End the job with the model it has."""
    return end_job(job, Phase.STOPPED, "the job was stopped", final_reason="stopped by its user")


def change_parameters(job: Job, event: events.ParametersChanged) -> JobStep:
    """Let the next round take the new settings over."""
    return JobStep(replace(job, next_spec=event.spec))


def change_funding(job: Job, event: events.FundingChanged) -> JobStep:
    """Keep what is funded; a job that waits looks again whether a round may open."""
    job = replace(job, funding=Funding(event.funded_samples, event.reason))
    return open_round(job) if job.phase is Phase.WAITING else JobStep(job)


def _renew_leases(job: Job, round_: Round) -> Job:
    """Fresh leases for pending participants, and another chance for those who handed back."""
    lease = job.next_lease
    paused_ms = job.at_ms - job.paused_at_ms
    again: dict[NodeId, Participant] = {}
    orphans = list(round_.orphans)
    for node, participant in round_.participants.items():
        handed_back = participant.work is WorkState.HANDED_BACK and participant.shard in orphans
        tries_again = handed_back and job.members[node].can_work
        if participant.work is WorkState.PENDING or tries_again:
            if tries_again:
                orphans.remove(participant.shard)
            assigned_at_ms = Milliseconds(participant.assigned_at_ms + paused_ms)
            again[node] = replace(
                participant, work=WorkState.PENDING, lease=lease, assigned_at_ms=assigned_at_ms
            )
            lease += 1
    deadline_at_ms = round_.deadline_at_ms
    if deadline_at_ms:
        deadline_at_ms = Milliseconds(deadline_at_ms + paused_ms)
    round_ = replace(round_, orphans=tuple(orphans), deadline_at_ms=deadline_at_ms)
    return replace(job, round=replace_participants(round_, again), next_lease=lease)
