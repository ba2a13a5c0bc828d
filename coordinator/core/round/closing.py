"""Closes rounds, aggregates their updates, and ends jobs."""

from math import ceil

from msgspec.structs import replace

from coordinator.core.job.commands import Aggregate, FoldedUpdate, ReleaseNode
from coordinator.core.job.state import Job, Model, Participant, Phase, Round, WorkState
from coordinator.core.plan.deadline import LEAST_MS
from coordinator.core.plan.weights import UpdateWork, Weights, update_weights
from coordinator.core.round.assigning import (
    JobStep,
    cancellations,
    deadline,
    replace_participants,
)
from coordinator.core.round.completion import available_nodes
from coordinator.core.round.shards import return_samples
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

_ROUNDING = 1e-9  # 0.55 * 20 is a little more than 11 in floating point
_QUORUM_TIMES = 4
"""A round that was planned before any node was measured closes after so many times the time that
its quorum took. All take as many steps in it: a node may be so many times slower than the median.
"""


def close_if_due(step: JobStep) -> JobStep:
    """Close the round if its rule says so; otherwise leave it open.

    It closes when no expected update is missing, or when its deadline has passed and a quorum is
    there. A round without a single update never closes. One that was planned without a deadline,
    since nothing was known of its nodes, has one as soon as its quorum is there.
    """
    job, round_ = step.job, step.job.round
    if round_ is None or job.phase is not Phase.TRAINING or job.lost_model:
        return step
    received, pending = (
        round_.counts.get(work, 0) for work in (WorkState.RECEIVED, WorkState.PENDING)
    )
    # A lost node counts only as long as nobody has taken its shard over.
    assigned = received + pending + len(round_.orphans)
    quorum = max(1, ceil(round_.spec.round.quorum * assigned - _ROUNDING))
    if not received:
        is_stalled = not pending and round_.counts.get(WorkState.HANDED_BACK, 0) > 0
        after = JobStep(_pause_stalled(job) if is_stalled else job)
    elif not pending:
        after = _close_round(
            job, round_, f"every expected update is there ({received} of {assigned})"
        )
    elif received < quorum:
        after = JobStep(job)
    elif round_.is_overdue:
        after = _close_round(
            job,
            round_,
            f"deadline passed with a quorum ({received} of {assigned}, {quorum} needed)",
        )
    else:
        after = _set_late_deadline(job, round_)
    return JobStep(after.job, (*step.commands, *after.commands))


def end_job(job: Job, phase: Phase, reason: str, *, final_reason: str = "") -> JobStep:
    """Take all work back, let every node go, and move on to a last phase.

    Args:
        job: A job that has not ended.
        phase: The phase that it moves to.
        reason: What nodes are told.
        final_reason: The job's reason, where it is another.
    """
    cancelled = cancellations(job.round, reason) if job.round is not None else ()
    present = [node for node, member in job.members.items() if member.is_present]
    members = {
        node: replace(member, is_present=False, is_leaving=False)
        for node, member in job.members.items()
    }
    job = replace(job, phase=phase, resume_to=None, reason=final_reason or reason, members=members)
    return JobStep(job, (*cancelled, *(ReleaseNode(node, reason) for node in present)))


def aggregate(round_: Round, base: Model) -> Aggregate:
    """The command that makes the next model of ``base``: the same round gives the same one."""
    weights, scale = _weights(round_)
    return Aggregate(
        round=round_.number,
        base=base,
        updates=tuple(
            FoldedUpdate(node, participant.slot, update.blob, weights[node], update.codec)
            for node, participant, update in round_.accepted_updates
        ),
        spec=round_.spec,
        down=round_.down,
        is_sparse=round_.is_sparse,
        scale=scale,
    )


def _weights(round_: Round) -> Weights:
    """Samples, unless inner steps differ on purpose: then the weights of the plan's rule."""
    updates = {node: update for node, _, update in round_.accepted_updates}
    if round_.spec.strategy != "aware":
        return Weights({node: update.samples for node, update in updates.items()}, 1.0)
    done = {
        node: UpdateWork(update.samples, update.inner_steps) for node, update in updates.items()
    }
    return update_weights(done, round_.spec.data.sharding)


def _set_late_deadline(job: Job, round_: Round) -> JobStep:
    """Give the round a deadline if its plan could not: a node that hangs does so for ever."""
    if round_.spec.strategy != "aware" or round_.deadline_at_ms:
        return JobStep(job)
    took_ms = max(participant.took_ms for participant in round_.participants.values())
    at_ms = Milliseconds(job.at_ms + max(LEAST_MS, (_QUORUM_TIMES - 1) * took_ms))
    job = replace(job, round=replace(round_, deadline_at_ms=at_ms))
    return JobStep(job, deadline(job))


def _pause_stalled(job: Job) -> Job:
    """All available nodes gave their shards back: trying again at once would only repeat it."""
    if not available_nodes(job):
        return job
    return replace(
        job,
        phase=Phase.PAUSED,
        resume_to=Phase.TRAINING,
        paused_at_ms=job.at_ms,
        reason="every participant handed its shard back; see the nodes' reasons",
    )


def _close_round(job: Job, round_: Round, why: str) -> JobStep:
    """Cut pending participants, put shards without an update back, and aggregate the rest."""
    reason = f"round {round_.number} closed: {why}"
    cut: dict[NodeId, Participant] = {
        node: replace(participant, work=WorkState.CUT)
        for node, participant in round_.pending.items()
    }
    streams = list(job.streams)
    for shard in (*(participant.shard for participant in cut.values()), *round_.orphans):
        return_samples(streams, shard.partition, shard.ranges)
    closed = replace_participants(replace(round_, orphans=()), cut)
    job = replace(job, phase=Phase.AGGREGATING, reason=reason, round=closed, streams=tuple(streams))
    return JobStep(job, (*cancellations(round_, reason), aggregate(closed, job.newest_model)))
