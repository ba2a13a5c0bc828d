"""Invariants of a job in every state and across every step, whatever the network does."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from coordinator.core.training.available import available_nodes
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.state import ENDED, Job, Phase, Shard
from coordinator.core.training.waiting import waits_for_all
from coordinator.core.work.leases import WorkState

_WITH_ROUND = frozenset({Phase.TRAINING, Phase.AGGREGATING})


def violations(job: Job) -> tuple[str, ...]:
    """Safety: the invariants that this state breaks, in words; empty when all is well."""
    return tuple(_break_upload(job))


def step_violations(before: Job, after: Job) -> tuple[str, ...]:
    """Safety across one step: what may only grow has not shrunk, what has ended stays ended."""
    return (*_broken_step(before, after), *_broken_promises(before, after))


def _break_upload(job: Job) -> Iterator[str]:
    where = job.resume_to or job.phase
    if where in _WITH_ROUND and job.round is None:
        yield f"{where.value} without a round"
    if job.phase is Phase.PAUSED and job.resume_to is None:
        yield "paused without a way back"
    if where is Phase.PLANNING and job.round is not None:
        yield "a round is planned while another is open"
    if job.round is not None and job.model is not None and job.round.number != job.model.round:
        yield f"round {job.round.number} on the model of round {job.model.round}"
    yield from _lease_violations(job)
    yield from _long_lease_violations(job)
    yield from _billing_violations(job)
    yield from _prefetch_violations(job)
    yield from _own_data_violations(job)
    yield from _stall_violations(job)
    yield from _end_violations(job)
    if job.phase not in ENDED:
        yield from _sample_violations(job)
        if job.model is not None and job.model.blob.digest not in live_blobs(job):
            yield "the current model may be collected"


def _lease_violations(job: Job) -> Iterator[str]:
    if job.round is None:
        return
    works = Counter(participant.work for participant in job.round.participants.values())
    if works != Counter(job.round.counts):
        yield f"participants are miscounted: {job.round.counts}"
    if len(job.round.orphans) > len(job.round.participants):
        yield "more shards are orphaned than were given out"
    leases = [participant.lease for participant in job.round.participants.values()]
    if len(set(leases)) != len(leases):
        yield f"one lease for two participants: {sorted(leases)}"
    if leases and max(leases) >= job.next_lease:
        yield "a lease from the future"
    slots = [member.slot for member in job.members.values()]
    if sorted(slots) != list(range(len(slots))):
        yield f"slots are not 0..n: {sorted(slots)}"


def _long_lease_violations(job: Job) -> Iterator[str]:
    """A lease over several rounds ends, its node has no other work, and its base is kept."""
    newest = job.model.round if job.model is not None else 0
    kept_blobs = live_blobs(job) if job.long_leases else frozenset()
    for node, each in job.long_leases.items():
        if each.base is None or not each.base.round <= newest <= each.base.last_round + 1:
            yield f"{node} has a lease over several rounds that should be over"
        elif each.is_open and each.base.model.blob.digest not in kept_blobs:
            yield f"the base of {node}'s lease may be collected"
        if job.round is not None and node in job.round.pending:
            yield f"{node} has two leases"
        if each.is_open and (job.phase in ENDED or not job.members[node].is_present):
            yield f"{node} has a lease over several rounds and is not at work"


def _billing_violations(job: Job) -> Iterator[str]:
    """What a round folded is billed in its epoch."""
    for node, _, update in job.closed.accepted_updates if job.closed is not None else ():
        if job.closed is not None and update.epoch not in (None, job.closed.epoch):
            yield f"{node} is billed in epoch {update.epoch}, not {job.closed.epoch}"


def _prefetch_violations(job: Job) -> Iterator[str]:
    if job.round is None:
        return
    for node, member in job.members.items():
        if member.prefetch is not None and member.prefetch.round != job.round.number + 1:
            yield f"{node} prefetches round {member.prefetch.round}, which is not the next"
    for node, participant in job.round.participants.items():
        first, ranges = participant.prefetched, participant.shard.ranges
        if first is not None and first.ranges != ranges[: len(first.ranges)]:
            yield f"{node} prefetched samples that its shard does not begin with"


def _own_data_violations(job: Job) -> Iterator[str]:
    """Data that stay on nodes: nobody has a position of another's partition."""
    if job.round is None or not job.spec.data.stays_on_nodes:
        return
    for node, participant in job.round.participants.items():
        if participant.shard.partition != job.members[node].slot:
            yield f"{node} was assigned samples of slot {participant.shard.partition}"
    if job.round.duplicates:
        yield "samples that stay on a node cannot be another's, too"


def _stall_violations(job: Job) -> Iterator[str]:
    """Somebody who could work is here, nobody works, and nothing is on its way; or nobody will look
    who is late.
    """
    if job.phase is not Phase.TRAINING or job.round is None or job.lost_model:
        return
    counts = job.round.counts
    at_work = counts.get(WorkState.PENDING, 0) + counts.get(WorkState.ON_TRIAL, 0)
    if not at_work and (idle := available_nodes(job)):
        yield f"round {job.round.number} waits for nobody while {idle} are here"
    is_timed = job.round.timer_at_ms or job.round.is_overdue or waits_for_all(job.round.spec)
    if at_work and not is_timed:
        yield f"nobody will look who is late in round {job.round.number}"


def _end_violations(job: Job) -> Iterator[str]:
    """A job is over when it has ended, and not before."""
    if job.is_over != (job.phase in ENDED):
        yield f"{job.phase.value} is {'' if job.is_over else 'not '}over"


def _sample_violations(job: Job) -> Iterator[str]:
    """Every position ever assigned is accepted, held by somebody, orphaned, prefetched for the
    next round, or returned: once.
    """
    held_ranges = [
        (shard.partition, range_) for shard in _open_shards(job) for range_ in shard.ranges
    ]
    for partition, stream in enumerate(job.streams):
        held_ranges += [(partition, range_) for range_ in stream.returned]
    assigned_samples = sum(stream.cursor for stream in job.streams)
    held_samples = sum(range_.count for _, range_ in held_ranges)
    if assigned_samples != held_samples + job.tally.samples:
        yield (
            f"{assigned_samples} samples assigned, {held_samples} held,"
            f" {job.tally.samples} accepted"
        )
    ordered_ranges = sorted(
        (partition, range_.start, range_.count) for partition, range_ in held_ranges
    )
    for (part, start, count), (next_part, next_start, _) in pairwise(ordered_ranges):
        if part == next_part and start + count > next_start:
            yield f"position {next_start} of partition {part} is held twice"


def _open_shards(job: Job) -> Iterator[Shard]:
    """What nodes have to train on, or may. What another node has as well is not counted twice."""
    if job.round is not None:
        for node, participant in job.round.participants.items():
            is_twice = node in job.round.duplicates or job.round.is_covered(node)
            if participant.is_open and participant.repeats is None and not is_twice:
                yield participant.shard
        yield from job.round.orphans
    for participant in job.long_leases.values():
        if participant.is_open:
            yield participant.shard
    for node, member in job.members.items():
        if member.prefetch is not None:
            yield Shard(job.partition_of(node), member.prefetch.ranges)


def _broken_step(before: Job, after: Job) -> Iterator[str]:
    if after.at_ms < before.at_ms:
        yield "job time went back"
    if before.phase in ENDED and after.phase is not before.phase:
        yield f"{before.phase.value} became {after.phase.value}"
    if after.next_lease < before.next_lease:
        yield "leases went back"
    old = before.model.round if before.model is not None else 0
    new = after.model.round if after.model is not None else 0
    if new not in (old, old + 1):
        yield f"the model went from round {old} to {new}"
    for node, member in before.members.items():
        if after.members[node].slot != member.slot:
            yield f"{node} changed its slot"


def _broken_promises(before: Job, after: Job) -> Iterator[str]:
    if before.is_over and not after.is_over:
        yield "a job went on after its end"
