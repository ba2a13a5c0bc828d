"""The step of each event: of nodes, of users, payments and the clock, of evaluator and aggregation.

Whether an event is legal was asked before (`transition`).
"""

import msgspec
from msgspec.structs import replace

from coordinator.core.persistent_map import replace_items
from coordinator.core.training.assignment import JobStep, assignment, is_done, replace_participants
from coordinator.core.training.available import fit_of, with_memory_use
from coordinator.core.training.evaluation_steps import evaluate_if_due
from coordinator.core.training.figures import round_figures
from coordinator.core.training.hand_back import refit_work, with_reason
from coordinator.core.training.job import events
from coordinator.core.training.job.commands import CancelShard, Command
from coordinator.core.training.job.state import Job, Member, Model, Participant, Phase, Round
from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.training.lifecycle import close_if_due, close_if_outrun, end_job, open_round
from coordinator.core.training.long_leases import void_leases, with_long_lease
from coordinator.core.training.outstanding import evaluation_command, outstanding, remake
from coordinator.core.training.own_data import counted_streams, first_streams, with_own_streams
from coordinator.core.training.plan.memory_fit import tighter_fit
from coordinator.core.training.reassignment import (
    mark_late,
    reassign_orphans,
    relieve_silent,
    vacate_shard,
)
from coordinator.core.training.streams import return_samples, shard_samples
from coordinator.core.training.trust.duplicates import with_due, without_doubts
from coordinator.core.training.trust.judgement_text import judgement_text
from coordinator.core.training.trust.weights import ban_reason, without_trust
from coordinator.core.work import work_events
from coordinator.core.work.funding import Funding
from coordinator.core.work.leases import WorkState, elapsed_ms, renew_lease
from coordinator.core.work.members import (
    next_slot,
    present_again,
    release_if_leaving,
    with_leaving,
    with_member,
    without_presence,
)
from coordinator.core.work.work_commands import ReleaseNode, WriteRecord
from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Milliseconds, Samples


def add_node(job: Job, event: work_events.NodeJoined) -> JobStep:
    """Give the node its slot, and work if there is some."""
    before = job.members.get(event.node) or Member(slot=next_slot(job))
    fit = replace(before.fit, shortage="")  # its owner may have given it more memory
    member = replace(present_again(before, event), memory_bytes=event.memory_bytes, fit=fit)
    job = with_own_streams(with_member(job, event.node, member))
    if job.phase is Phase.WAITING:
        return open_round(job)
    step = reassign_orphans(job)
    relief = relieve_silent(step.job)
    return close_if_due(JobStep(relief.job, (*step.commands, *relief.commands)))


def lose_node(job: Job, event: work_events.NodeLost | work_events.NodePaused) -> JobStep:
    """Take the node's shard away; the round goes on without it."""
    job, _void = void_leases(without_presence(job, event.node), {event.node}, event.reason)
    if job.phase is Phase.WAITING:
        return open_round(job)
    if job.active_phase is not Phase.TRAINING:
        return JobStep(job)
    return close_if_due(vacate_shard(job, event.node, WorkState.LOST))


def drain_node(job: Job, event: work_events.NodeDraining) -> JobStep:
    """Let the node finish its current work, and no more."""
    participant = job.participant(event.node)
    if participant is not None and participant.is_open:
        return JobStep(with_leaving(job, event.node))
    job = without_presence(job, event.node)
    job = open_round(job).job if job.phase is Phase.WAITING else job
    return JobStep(job, (ReleaseNode(event.node, event.reason),))


def pause_node(job: Job, event: work_events.NodePaused) -> JobStep:
    """Take the node out at once. Unlike one that drains it keeps its end states for its return."""
    participant = job.participant(event.node)
    cancellation: tuple[Command, ...] = ()
    if participant is not None and participant.is_open:
        number = job.round_of(participant)
        cancellation = (CancelShard(event.node, number, participant.lease, event.reason),)
    step = lose_node(job, event)
    return JobStep(step.job, (*cancellation, *step.commands))


def readmit_node(job: Job, event: work_events.NodeReadmitted) -> JobStep:
    """Give a banned node work again, from the next round on; its votes grow like a newcomer's."""
    member = replace(job.members[event.node], ban="", useless=0)
    trust = without_trust(job.trust, event.node)
    trust = replace(trust, duplicates=without_doubts(trust.duplicates, event.node))
    job = replace(with_member(job, event.node, member), trust=trust)
    return open_round(job) if job.phase is Phase.WAITING else JobStep(job)


def receive_update(job: Job, event: events.UpdateReceived) -> JobStep:
    """Count the update in; it enters the mean when the round closes."""
    participant = job.participant(event.node)
    if participant is None:
        raise AssertionError("an update that is received has its participant")
    samples = shard_samples(participant.shard.ranges)
    update = replace(
        event.update,
        samples=samples,
        inner_steps=participant.inner_steps,
        codec=participant.codec,
    )
    took_ms = elapsed_ms(participant, event.at_ms)
    participant = replace(participant, work=WorkState.RECEIVED, update=update, took_ms=took_ms)
    before = job.members[event.node]
    member = replace(
        before,
        last_accepted=update.blob.digest,
        accepted_lease=event.lease,
        standing=before.standing.after_work(took_ms, participant.inner_steps),
        fit=fit_of(job, event.node) if participant.plan.micro_batch else before.fit,
    )
    is_long = participant.base is not None
    is_twice = participant.repeats is not None or (
        not is_long and job.open_round.is_covered(event.node)
    )
    twice = samples if is_twice else 0
    tally = replace(
        job.tally,
        samples=Samples(job.tally.samples + samples - twice),
        samples_twice=Samples(job.tally.samples_twice + twice),
        bytes_up=Bytes(job.tally.bytes_up + update.blob.size_bytes),
        updates_accepted=job.tally.updates_accepted + 1,
    )
    job = replace(
        with_memory_use(job, event.node, participant.plan, update),
        members=replace_items(job.members, {event.node: member}),
        streams=counted_streams(job, event.node, update.data_samples),
        tally=tally,
    )
    if is_long:
        step = _release_if_leaving(with_long_lease(job, event.node, participant), event.node)
        return close_if_outrun(_open_if_waiting(step), event.node)
    round_ = job.open_round
    round_ = replace(round_, longest_ms=Milliseconds(max(round_.longest_ms, took_ms)))
    job = replace(job, round=replace_participants(round_, {event.node: participant}))
    return close_if_due(_release_if_leaving(job, event.node))


def _open_if_waiting(step: JobStep) -> JobStep:
    """Open the next round where nothing but its nodes was missing."""
    if step.job.phase is not Phase.WAITING:
        return step
    opening_step = open_round(step.job)
    return JobStep(opening_step.job, (*step.commands, *opening_step.commands))


def count_rejection(job: Job, _event: events.UpdateRejected) -> JobStep:
    """Count a rejected update for the tables."""
    tally = replace(job.tally, updates_rejected=job.tally.updates_rejected + 1)
    return JobStep(replace(job, tally=tally))


def take_back_shard(job: Job, event: events.ShardHandedBack) -> JobStep:
    """Give the shard to its holder again, with less in memory at once, or to another node. A holder
    that leaves is lost to the round like any other, and may take part again once it is back.
    """
    if event.node in job.long_leases:
        return _take_back_long(job, event)
    is_leaving = job.members[event.node].is_leaving
    if event.lacks_memory and not is_leaving:
        again = refit_work(job, event.node)
        if again.commands:
            return again
        job = again.job
    work = WorkState.LOST if is_leaving else WorkState.HANDED_BACK
    step = _release_if_leaving(with_reason(job, event.node, event.reason), event.node)
    vacancy = vacate_shard(step.job, event.node, work)
    return close_if_due(JobStep(vacancy.job, (*step.commands, *vacancy.commands)))


def _take_back_long(job: Job, event: events.ShardHandedBack) -> JobStep:
    """Put the samples of a lease over several rounds back. The next one is made to fit."""
    participant, member = job.long_leases[event.node], job.members[event.node]
    if event.lacks_memory and participant.base is not None:
        spec = participant.base.spec
        fit = tighter_fit(participant.plan, spec, can_checkpoint=job.can_checkpoint)
        member = replace(member, fit=fit)
        job = with_member(job, event.node, member)
    job, _void = void_leases(job, {event.node}, event.reason)
    return _open_if_waiting(_release_if_leaving(job, event.node))


def _release_if_leaving(job: Job, node: NodeId) -> JobStep:
    return JobStep(*release_if_leaving(job, node))


def note_deadline(job: Job, event: events.DeadlineReached) -> JobStep:
    """See who is late. Once the round's deadline has passed a quorum is enough."""
    round_ = job.open_round
    is_passed = bool(round_.deadline_at_ms) and event.at_ms >= round_.deadline_at_ms
    is_overdue = round_.is_overdue or is_passed
    round_ = replace(round_, is_overdue=is_overdue, timer_at_ms=Milliseconds(0))
    job = replace(job, round=round_)
    step = close_if_due(JobStep(job))
    if step.job.phase is not Phase.TRAINING:
        return step
    return close_if_due(relieve_silent(mark_late(job)))


def resume_job(job: Job, _event: work_events.JobResumed) -> JobStep:
    """Go on where the pause came in: the same shards, new leases, the deadline's remaining time."""
    phase = job.active_phase
    job = replace(job, phase=phase, resume_to=None, reason="resumed by its user")
    if phase in (Phase.WAITING, Phase.PLANNING):
        return open_round(job)
    if phase is not Phase.TRAINING:
        return JobStep(job)
    job = _renew_leases(job, job.open_round)
    assignments: tuple[Command, ...] = tuple(
        assignment(job, node) for node in job.open_round.pending
    )
    step = reassign_orphans(job)
    return close_if_due(JobStep(step.job, (*assignments, *step.commands)))


def note_restart(job: Job, _event: work_events.CoordinatorChanged) -> JobStep:
    """Hold no time of the open round against its nodes: they may have been without coordinator."""
    if job.round is None:
        return JobStep(job)
    return JobStep(replace(job, round=replace(job.round, is_interrupted=True)))


def stop_job(job: Job, _event: work_events.JobStopped) -> JobStep:
    """End the job with the model it has."""
    return end_job(job, Phase.STOPPED, "the job was stopped", final_reason="stopped by its user")


def change_parameters(job: Job, event: events.ParametersChanged) -> JobStep:
    """Let the next round take the new settings over."""
    return JobStep(replace(job, next_spec=event.spec))


def change_funding(job: Job, event: work_events.FundingChanged) -> JobStep:
    """Keep what is funded; a job that waits looks again whether a round may open."""
    job = replace(job, funding=Funding(event.funded_units, event.reason))
    return open_round(job) if job.phase is Phase.WAITING else JobStep(job)


def _renew_leases(job: Job, round_: Round) -> Job:
    """Fresh leases for pending participants, and another chance for those who handed back."""
    lease = job.next_lease
    paused_ms = Milliseconds(job.at_ms - job.paused_at_ms)
    again: dict[NodeId, Participant] = {}
    orphans = list(round_.orphans)
    for node, participant in round_.participants.items():
        handed_back = participant.work is WorkState.HANDED_BACK and participant.shard in orphans
        tries_again = handed_back and job.members[node].can_work
        if participant.is_open or tries_again:
            if tries_again:
                orphans.remove(participant.shard)
            again[node] = renew_lease(participant, lease, paused_ms)
            lease += 1
    deadline_at_ms, trial_until_ms = (
        Milliseconds(at_ms + paused_ms if at_ms else 0)
        for at_ms in (round_.deadline_at_ms, round_.trial_until_ms)
    )
    round_ = replace(
        round_,
        orphans=tuple(orphans),
        is_interrupted=True,
        deadline_at_ms=deadline_at_ms,
        trial_until_ms=trial_until_ms,
        timer_at_ms=Milliseconds(0),
    )
    return replace(job, round=replace_participants(round_, again), next_lease=lease)


def take_first_model(job: Job, event: events.ModelInitialised) -> JobStep:
    """Take the first model over, or the first model made again after its bytes were lost."""
    if job.lost_model:
        return _restore_model(job, event.model)
    job = replace(
        job,
        model=event.model,
        layout=event.layout,
        workload_version=event.workload_version,
        can_checkpoint=event.can_checkpoint,
        operators=event.operators,
        target_mode=event.target_mode,
        notes=event.notes,
        mixture=None if event.mixture is msgspec.UNSET else event.mixture,
        streams=first_streams(job, event.partition_sizes),
    )
    commands: tuple[Command, ...] = ()
    if event.is_evaluated:
        job = replace(job, evaluating=(event.model,))
        commands = (evaluation_command(job, event.model),)
    if job.phase is Phase.PAUSED:
        return JobStep(replace(job, resume_to=Phase.WAITING), commands)
    step = open_round(job)
    return JobStep(step.job, (*commands, *step.commands))


def fail_preparation(job: Job, event: events.PreparationFailed) -> JobStep:
    """End the job: nothing can be trained."""
    return end_job(job, Phase.FAILED, event.reason)


def take_next_model(job: Job, event: events.AggregateReady) -> JobStep:
    """Move on to the next model."""
    if job.lost_model:
        return _restore_model(job, event.model)
    round_ = _mark_unreadable(job.open_round, event)
    job = _refund_unreadable(job, round_, event)
    job = replace(
        job,
        previous=job.model,
        model=event.model,
        closed=round_,
        round=None,
        spec=job.next_spec or job.spec,
        next_spec=None,
        trust=_trust_after(job, round_),
        draw=event.draw,
        members=_members_after(job, round_),
        tally=replace(job.tally, bytes_down=Bytes(job.tally.bytes_down + event.bytes_down)),
    )
    record = WriteRecord(round_figures(job, round_, event))
    evaluation = evaluate_if_due(job, event.model)
    job = evaluation.job
    if is_done(job):
        reason = "all rounds are done; the final model is being evaluated"
        after = end_job(job, Phase.FINISHING, "all rounds are done", final_reason=reason)
    elif job.phase is Phase.PAUSED:
        after = JobStep(replace(job, resume_to=Phase.WAITING))
    else:
        after = open_round(job)
    return JobStep(after.job, (record, *evaluation.commands, *after.commands))


def _trust_after(job: Job, round_: Round) -> TrustMemory:
    trust = round_.weighing.memory if round_.weighing is not None else job.trust
    return replace(trust, duplicates=with_due(trust.duplicates, round_))


def _members_after(job: Job, round_: Round) -> dict[NodeId, Member]:
    """The members with what the round found of their updates; some may be banned by it."""
    members, weighing = dict(job.members), round_.weighing
    if weighing is None:
        return members
    for node, _, _ in round_.accepted_updates:
        useless = members[node].useless + 1 if node in weighing.useless else 0
        ban = ban_reason(useless, weighing.reasons.get(node, ""))
        judgement = judgement_text(weighing, node, round_.number)
        members[node] = replace(members[node], useless=useless, ban=ban, judgement=judgement)
    return members


def remake_model(job: Job, event: events.ModelLost) -> JobStep:
    """Make the current model again: the same updates on the same base give the same bits.

    Without its base there is nothing left to make it of.
    """
    if job.lost_model:
        reason = f"the model and the one before it are damaged: {event.reason}"
        return end_job(job, Phase.FAILED, reason)
    job = replace(job, lost_model=True, reason=f"the model is made again: {event.reason}")
    return JobStep(job, (remake(job),))


def _restore_model(job: Job, model: Model) -> JobStep:
    if job.model is None or model.blob.digest != job.model.blob.digest:
        reason = "the damaged model could not be made again bit for bit"
        return end_job(job, Phase.FAILED, reason)
    job = replace(job, lost_model=False, reason="the damaged model was made again")
    if job.phase is Phase.WAITING:
        return open_round(job)
    step = close_if_due(JobStep(job))
    is_closed = job.phase is Phase.TRAINING and step.job.phase is Phase.AGGREGATING
    return JobStep(step.job, step.commands if is_closed else outstanding(step.job))


def _mark_unreadable(round_: Round, event: events.AggregateReady) -> Round:
    """The closed round with the updates that were unreadable on disk marked as such."""
    unreadable = {
        node: replace(round_.participants[node], work=WorkState.UNREADABLE)
        for node, _ in event.omitted
    }
    marked_round = replace_participants(round_, unreadable)
    return replace(marked_round, agreement=event.agreement, weighing=event.weighing)


def _refund_unreadable(job: Job, round_: Round, event: events.AggregateReady) -> Job:
    """Put the samples of unreadable updates back, and forget that they were accepted."""
    members, streams, tally = dict(job.members), list(job.streams), job.tally
    for node, _reason in event.omitted:
        participant = round_.participants[node]
        twice = _is_twice(round_, node)
        if not twice:
            return_samples(streams, participant.shard.partition, participant.shard.ranges)
        members[node] = replace(members[node], last_accepted=None)
        samples = participant.update.samples if participant.update else 0
        tally = replace(
            tally,
            samples=Samples(tally.samples - (0 if twice else samples)),
            samples_twice=Samples(tally.samples_twice - (samples if twice else 0)),
            updates_accepted=tally.updates_accepted - 1,
            updates_rejected=tally.updates_rejected + 1,
        )
    return replace(job, members=members, streams=tuple(streams), tally=tally)


def _is_twice(round_: Round, node: NodeId) -> bool:
    """Whether another readable update is of the same shard, or the other one is refunded whole."""
    if round_.participants[node].repeats is not None:
        return True
    partner = round_.duplicates.get(node)
    is_lost_too = partner is not None and round_.participants[partner].work is WorkState.UNREADABLE
    return is_lost_too or round_.is_covered(node)
