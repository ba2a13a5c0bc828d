"""What users, payments and the clock do: pause, resume, stop, set, fund, reach a deadline."""

from msgspec.structs import replace

from coordinator.core.job.commands import CancelShard
from coordinator.core.job.events import FundingChanged, JobPaused, ParametersChanged
from coordinator.core.job.state import Funding, Job, Participant, Phase, Round, WorkState
from coordinator.core.round.membership import release_all
from coordinator.core.round.rounds import (
    JobStep,
    assignment,
    close_if_due,
    deadline,
    open_round,
    reassign_orphans,
    replace_participants,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def note_deadline(job: Job) -> JobStep:
    """From here on a quorum is enough."""
    if job.round is None:
        raise AssertionError("a deadline belongs to a round")
    return close_if_due(replace(job, round=replace(job.round, is_overdue=True)))


def pause_job(job: Job, event: JobPaused) -> JobStep:
    """Take pending work back; keep everything that was accepted."""
    commands: tuple[CancelShard, ...] = ()
    if job.phase is Phase.TRAINING and job.round is not None:
        commands = tuple(
            CancelShard(node, job.round.number, participant.lease, "the job was paused")
            for node, participant in job.round.participants.items()
            if participant.work is WorkState.PENDING
        )
    job = replace(
        job,
        phase=Phase.PAUSED,
        resume_to=job.phase,
        paused_at_ms=job.at_ms,
        reason=event.reason or "paused by its user",
    )
    return JobStep(job, commands)


def resume_job(job: Job) -> JobStep:
    """Go on where the pause came in: the same shards, new leases, the deadline's remaining time."""
    phase = job.resume_to
    if phase is None:
        raise AssertionError("a paused job knows where it was")
    job = replace(job, phase=phase, resume_to=None, reason="resumed by its user")
    if phase in (Phase.WAITING, Phase.PLANNING):
        return open_round(job)
    if phase is not Phase.TRAINING or job.round is None:
        return JobStep(job)
    job = _renew_leases(job, job.round)
    again = [node for node, part in _participants(job) if part.work is WorkState.PENDING]
    step = reassign_orphans(job)
    after = close_if_due(step.job)
    commands = (*deadline(job), *(assignment(job, node) for node in again), *step.commands)
    return JobStep(after.job, (*commands, *after.commands))


def stop_job(job: Job) -> JobStep:
    """End the job with the model it has."""
    step = release_all(job, "the job was stopped")
    return JobStep(
        replace(step.job, phase=Phase.STOPPED, resume_to=None, reason="stopped by its user"),
        step.commands,
    )


def change_parameters(job: Job, event: ParametersChanged) -> JobStep:
    """Let the next round take the new settings over."""
    return JobStep(replace(job, next_spec=event.spec))


def change_funding(job: Job, event: FundingChanged) -> JobStep:
    """Keep what is funded; a job that waits looks again whether a round may open."""
    job = replace(job, funding=Funding(event.funded_samples, event.reason))
    return open_round(job) if job.phase is Phase.WAITING else JobStep(job)


def _participants(job: Job) -> list[tuple[NodeId, Participant]]:
    return list(job.round.participants.items()) if job.round is not None else []


def _renew_leases(job: Job, round_: Round) -> Job:
    """Fresh leases for pending participants, and another chance for those who handed back."""
    lease = job.next_lease
    paused_ms = job.at_ms - job.paused_at_ms
    again: dict[NodeId, Participant] = {}
    orphans = list(round_.orphans)
    for node, participant in round_.participants.items():
        is_here = job.members[node].is_present and not job.members[node].is_leaving
        tries_again = participant.work is WorkState.HANDED_BACK and participant.shard in orphans
        if participant.work is WorkState.PENDING or (is_here and tries_again):
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
