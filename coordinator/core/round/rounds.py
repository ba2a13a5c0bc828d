"""Opening, staffing and closing a round. Pure functions on the job; the machine decides when."""

from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.commands import (
    Aggregate,
    AssignShard,
    CancelShard,
    Command,
    FoldedUpdate,
    SetDeadline,
)
from coordinator.core.job import (
    Job,
    Member,
    Participant,
    Phase,
    Round,
    SampleRange,
    Shard,
    Stream,
    Work,
)
from coordinator.core.round.seeds import seed_for
from coordinator.core.round.streams import put_back, taken
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples

_ROUNDING = 1e-9  # 0.55 * 20 is a little more than 11 in floating point


class Step(NamedTuple):
    """What one event leads to: the next state, and what the shell is to do once it is persisted."""

    job: Job
    commands: tuple[Command, ...] = ()


def staff(job: Job) -> list[NodeId]:
    """Nodes that can take work, in slot order."""
    able = [
        (member.slot, node)
        for node, member in job.members.items()
        if member.is_present and not member.is_leaving
    ]
    return [node for _, node in sorted(able)]


def nodes_needed(job: Job) -> int:
    """Nodes without which no round opens: the stated number for the first, then one."""
    is_first = job.model is None or job.model.round == 0
    return job.spec.training.nodes if is_first else 1


def opened(job: Job) -> Step:
    """Open the next round when enough nodes are there, else wait for them."""
    if job.model is None:
        raise AssertionError("a round needs a model")
    number = job.model.round
    job = replace(job, spec=job.next_spec or job.spec, next_spec=None, round=None)
    nodes, needed = staff(job), nodes_needed(job)
    if len(nodes) < needed:
        reason = f"{len(nodes)} of {needed} nodes are here"
        return Step(replace(job, phase=Phase.WAITING, reason=reason))
    if job.lost_model:
        return Step(replace(job, phase=Phase.WAITING))
    participants: dict[NodeId, Participant] = {}
    streams = list(job.streams)
    lease = job.next_lease
    steps = job.spec.training.inner_steps
    for node in nodes:
        slot = job.members[node].slot
        partition = slot % len(streams)
        ranges, streams[partition] = taken(streams[partition], steps * job.spec.training.batch_size)
        participants[node] = Participant(slot, lease, Shard(partition, ranges), steps)
        lease += 1
    deadline_at_ms = Milliseconds(0)
    if job.spec.round.deadline_ms:
        deadline_at_ms = Milliseconds(job.at_ms + job.spec.round.deadline_ms)
    round_ = Round(
        number=number,
        spec=job.spec,
        base_samples=job.tally.samples,
        total_samples=_total_samples(job, number, len(nodes)),
        opened_at_ms=job.at_ms,
        participants=participants,
        counts={Work.PENDING: len(participants)},
        deadline_at_ms=deadline_at_ms,
    )
    job = replace(
        job,
        phase=Phase.TRAINING,
        reason=f"round {number}: {len(nodes)} taking part",
        round=round_,
        streams=tuple(streams),
        next_lease=lease,
    )
    return Step(job, (*deadline(job), *(assignment(job, node) for node in nodes)))


def changed(round_: Round, participants: dict[NodeId, Participant]) -> Round:
    """The round with these participants in place of what they were before."""
    counts = dict(round_.counts)
    for node, participant in participants.items():
        before = round_.participants.get(node)
        if before is not None:
            counts[before.work] -= 1
        counts[participant.work] = counts.get(participant.work, 0) + 1
    return replace(round_, participants={**round_.participants, **participants}, counts=counts)


def deadline(job: Job) -> tuple[SetDeadline, ...]:
    """The open round's deadline, if it has one that has not passed."""
    round_ = job.round
    if round_ is None or not round_.deadline_at_ms or round_.is_overdue:
        return ()
    return (SetDeadline(round_.number, round_.deadline_at_ms),)


def assignment(job: Job, node: NodeId) -> AssignShard:
    """Give a pending participant its work. The same state gives the same command."""
    round_, model = job.round, job.model
    if round_ is None or model is None:
        raise AssertionError("an assignment needs an open round")
    participant = round_.participants[node]
    spec = round_.spec
    return AssignShard(
        node=node,
        round=round_.number,
        lease=participant.lease,
        slot=participant.slot,
        shard=participant.shard,
        partitions=len(job.streams),
        spec=spec,
        manifest=job.manifest,
        model=model,
        inner_steps=participant.inner_steps,
        seed=seed_for(spec.training.seed, "inner", participant.slot, round_.number),
        global_samples=round_.base_samples,
        total_samples=round_.total_samples,
        deadline_at_ms=round_.deadline_at_ms,
        last_accepted=job.members[node].last_accepted,
        reason=f"round {round_.number}, slot {participant.slot}: "
        f"H={participant.inner_steps}, {spec.codec.up}",
    )


def _total_samples(job: Job, number: int, participants: int) -> Samples:
    """Where schedules end: what was processed, and the rounds to come as if they were like this."""
    training = job.spec.training
    per_round = training.inner_steps * training.batch_size * participants
    return Samples(job.tally.samples + (training.rounds - number) * per_round)


def vacated(job: Job, node: NodeId, work: Work) -> Step:
    """Take a pending participant's shard away and give it to an idle node, if there is one."""
    round_ = job.round
    if round_ is None or (gone := round_.participants.get(node)) is None:
        return Step(job)
    if gone.work is Work.PENDING:
        round_ = replace(round_, orphans=(*round_.orphans, gone.shard))
    elif gone.work is not Work.HANDED_BACK:
        return Step(job)
    return taken_over(replace(job, round=changed(round_, {node: replace(gone, work=work)})))


def taken_over(job: Job) -> Step:
    """Give orphaned shards to nodes that have no part in the round yet, and lost nodes that are
    back.
    """
    round_ = job.round
    if round_ is None or not round_.orphans or job.phase is not Phase.TRAINING:
        return Step(job)
    orphans = list(round_.orphans)
    lease = job.next_lease
    started: dict[NodeId, Participant] = {}
    for node in staff(job):
        before = round_.participants.get(node)
        if not orphans or (before is not None and before.work is not Work.LOST):
            continue
        own = before is not None and before.shard in orphans
        shard = orphans.pop(orphans.index(before.shard) if own and before else 0)
        steps = round_.spec.training.inner_steps
        started[node] = Participant(job.members[node].slot, lease, shard, steps)
        lease += 1
    round_ = changed(replace(round_, orphans=tuple(orphans)), started)
    job = replace(job, round=round_, next_lease=lease)
    return Step(job, tuple(assignment(job, node) for node in started))


def closed(job: Job) -> Step:
    """Close the round if its rule says so; otherwise leave it open.

    It closes when no expected update is missing, or when its deadline has passed and a quorum is
    there. A round without a single update never closes.
    """
    round_ = job.round
    if round_ is None or job.phase is not Phase.TRAINING or job.lost_model:
        return Step(job)
    received, pending = (round_.counts.get(work, 0) for work in (Work.RECEIVED, Work.PENDING))
    # Who is gone counts only as long as nobody has taken the shard over.
    assigned = received + pending + len(round_.orphans)
    quorum = max(1, ceil(round_.spec.round.quorum * assigned - _ROUNDING))
    if not received:
        has_handed_back = round_.counts.get(Work.HANDED_BACK, 0) > 0
        return _stalled(job) if not pending and has_handed_back else Step(job)
    if not pending:
        why = f"every expected update is there ({received} of {assigned})"
    elif round_.is_overdue and received >= quorum:
        why = f"deadline passed with a quorum ({received} of {assigned}, {quorum} needed)"
    else:
        return Step(job)
    cut = tuple(
        CancelShard(node, round_.number, participant.lease, f"round {round_.number} closed: {why}")
        for node, participant in round_.participants.items()
        if participant.work is Work.PENDING
    )
    job = _settled(job, why)
    return Step(job, (*cut, aggregate(job)))


def _stalled(job: Job) -> Step:
    """Everybody who is here gave the shard back: trying again at once would only repeat it."""
    if not staff(job):
        return Step(job)
    return Step(
        replace(
            job,
            phase=Phase.PAUSED,
            resume_to=Phase.TRAINING,
            paused_at_ms=job.at_ms,
            reason="paused: every participant handed its shard back; see the nodes' reasons",
        )
    )


def _settled(job: Job, why: str) -> Job:
    """The closed round: shards without an update go back to their streams."""
    round_ = job.round
    if round_ is None:
        raise AssertionError("no round to close")
    streams = list(job.streams)
    cut: dict[NodeId, Participant] = {}
    for node, participant in round_.participants.items():
        if participant.work is Work.PENDING:
            cut[node] = replace(participant, work=Work.CUT)
            _return_shard(streams, participant.shard)
    for shard in round_.orphans:
        _return_shard(streams, shard)
    return replace(
        job,
        phase=Phase.AGGREGATING,
        reason=f"round {round_.number} closed: {why}",
        round=changed(replace(round_, orphans=()), cut),
        streams=tuple(streams),
    )


def _return_shard(streams: list[Stream], shard: Shard) -> None:
    streams[shard.partition] = put_back(streams[shard.partition], shard.ranges)


def aggregate(job: Job) -> Aggregate:
    """The command that folds the closed round's updates, in slot order."""
    if job.round is None or job.model is None:
        raise AssertionError("nothing to aggregate")
    return Aggregate(job.round.number, job.model, folded_updates(job.round), job.round.spec)


def folded_updates(round_: Round) -> tuple[FoldedUpdate, ...]:
    """The round's updates that enter the mean, in slot order."""
    received = [
        FoldedUpdate(node, participant.slot, participant.update.blob, participant.update.samples)
        for node, participant in round_.participants.items()
        if participant.work is Work.RECEIVED and participant.update is not None
    ]
    return tuple(sorted(received, key=lambda update: update.slot))


def shard_samples(ranges: tuple[SampleRange, ...]) -> Samples:
    """How many samples a shard holds."""
    return Samples(sum(range_.count for range_ in ranges))


def without(job: Job, node: NodeId) -> dict[NodeId, Member]:
    """The members with ``node`` no longer present."""
    member = replace(job.members[node], is_present=False, is_leaving=False)
    return {**job.members, node: member}
