"""How good accepted updates were, in basis points, and the records of it: what pay is weighted by.

Everything that goes in was measured by the coordinator; nothing a node says of itself does::

    quality = vote x timeliness

    vote        its share of a full vote in the fold, see `coordinator.core.trust`: what did not
                count for the model is not paid
    timeliness  time used against the time that the round allowed

A round is measured (`RoundMeasured`) with the event that made a model of it. A job that ends within
a round measures what it had accepted of that round without folding it. `JobEnded` follows the last
record.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.job.commands import Command, WriteRecord
from coordinator.core.job.events import (
    AggregateReady,
    Event,
    JobEnded,
    MeasuredUpdate,
    RoundMeasured,
)
from coordinator.core.job.state import (
    ENDED,
    AcceptedUpdate,
    Job,
    Participant,
    Round,
    Weighing,
)
from coordinator.core.trust import WHOLE, known_votes
from hypergpu.ids import Digest, NodeId
from hypergpu.statements import WHOLE_BPS, Contribution, Terms, shard_digest
from hypergpu.units import BasisPoints, Milliseconds, Samples


def offered_contribution(job: Job, node: NodeId, update: AcceptedUpdate) -> Contribution:
    """Contribution that a participant of the open round signs for an update that it offers."""
    if job.round is None or job.model is None:
        raise AssertionError("a contribution belongs to an open round")
    return contribution(job.terms, job.round, job.model.blob.digest, node, update)


def contribution(
    terms: Terms, round_: Round, base: Digest, node: NodeId, update: AcceptedUpdate
) -> Contribution:
    """Contribution of a participant of a round that started from the model ``base``.

    Samples and inner steps are those that the coordinator assigned, whatever the node states.
    """
    participant = round_.participants[node]
    shard = participant.shard
    return Contribution(
        job=terms.job,
        epoch=round_.epoch,
        round=round_.number,
        node=node,
        shard=shard_digest(shard.partition, ((run.start, run.count) for run in shard.ranges)),
        model=base,
        update=update.blob.digest,
        samples=Samples(sum(run.count for run in shard.ranges)),
        inner_steps=participant.inner_steps,
        compute_ms=update.compute_ms,
        update_bytes=update.blob.size_bytes,
        lease=participant.lease,
        nonce=update.nonce,
    )


LATE_LEAST = BasisPoints(5_000)
"""Quality left to a useful update that took twice its time or more."""
NO_EVIDENCE = "nothing was measured of it: it counted by the weight that its node had before"
RULE = "quality/3 held-out"


class Quality(NamedTuple):
    """A quality with its origin."""

    bps: BasisPoints
    reason: str


def quality_of(vote: int, why: str, took_ms: Milliseconds, allowed_ms: Milliseconds) -> Quality:
    """The quality of an accepted update, between 0 and 10,000.

    A larger vote, or less time, never lowers it.

    Args:
        vote: Its share of a full vote, in 1/65,536.
        why: Why the vote is not full; empty: it is.
        took_ms: From the assignment to the update's last byte, by the coordinator's clock.
        allowed_ms: From the assignment to the round's deadline; 0: it had none.
    """
    in_time, why_late = _time_bps(took_ms, allowed_ms)
    reasons = [each for each in (why, why_late) if each]
    return Quality(
        bps=BasisPoints(WHOLE_BPS * min(WHOLE, max(0, vote)) // WHOLE * in_time // WHOLE_BPS),
        reason="; ".join(reasons) or "it counted in full",
    )


def _time_bps(took_ms: Milliseconds, allowed_ms: Milliseconds) -> tuple[int, str]:
    late = took_ms - allowed_ms
    if allowed_ms <= 0 or late <= 0:
        return WHOLE_BPS, ""
    lost = (WHOLE_BPS - LATE_LEAST) * min(late, allowed_ms) // allowed_ms
    return WHOLE_BPS - lost, f"{late} ms after the deadline"


def record_quality(before: Job, event: Event, job: Job) -> tuple[Job, tuple[Command, ...]]:
    """Record the quality of what a step closed.

    Args:
        before: The job before the event.
        event: A legal event.
        job: The job as the round machine left it.

    Returns:
        The job, with commands that write records.
    """
    if job.is_over:
        return job, ()
    records: tuple[Command, ...] = ()
    if isinstance(event, AggregateReady) and not before.lost_model:
        records = _measure_folded(job)
    if job.phase in ENDED and before.phase not in ENDED:
        records = (*records, *_measure_open(job))
        end = JobEnded(at_ms=job.at_ms, phase=job.phase.value, reason=job.reason)
        records = (*records, WriteRecord(end))
        job = replace(job, is_over=True)
    return job, records


def _measure_folded(job: Job) -> tuple[Command, ...]:
    """Measure the round that has just become a model."""
    round_, base = job.closed, job.previous
    if round_ is None or base is None:
        raise AssertionError("a folded round has made a model")
    return (_record(job, round_, base.blob.digest, round_.weighing),)


def _measure_open(job: Job) -> tuple[Command, ...]:
    """Measure what an ended job accepted in the round that it never folds."""
    round_, model = job.round, job.model
    if round_ is None or model is None or not round_.accepted_updates:
        return ()
    return (_record(job, round_, model.blob.digest, None),)


def _record(job: Job, round_: Round, base: Digest, weighing: Weighing | None) -> WriteRecord:
    accepted = round_.accepted_updates
    votes, reasons = _votes(job, round_, weighing)
    measured = tuple(
        _measured_update(job.terms, round_, base, found)
        for found in (
            _CountedUpdate(node, part, update, votes.get(node, WHOLE), reasons.get(node, ""))
            for node, part, update in accepted
        )
    )
    return WriteRecord(RoundMeasured(at_ms=job.at_ms, round=round_.number, updates=measured))


def _votes(
    job: Job, round_: Round, weighing: Weighing | None
) -> tuple[Mapping[NodeId, int], Mapping[NodeId, str]]:
    """What the fold found, and where nothing was folded, what is known of each node."""
    if weighing is not None and weighing.no_evidence:
        nodes = [node for node, _, _ in round_.accepted_updates]
        return weighing.votes, {node: weighing.reasons.get(node, NO_EVIDENCE) for node in nodes}
    if weighing is not None:
        return weighing.votes, weighing.reasons
    votes = known_votes(job.trust, [node for node, _, _ in round_.accepted_updates])
    return votes, {node: "its earlier updates" for node, vote in votes.items() if vote < WHOLE}


class _CountedUpdate(NamedTuple):
    node: NodeId
    participant: Participant
    update: AcceptedUpdate
    vote: int
    why: str


def _measured_update(
    terms: Terms, round_: Round, base: Digest, found: _CountedUpdate
) -> MeasuredUpdate:
    participant = found.participant
    allowed_ms = Milliseconds(max(0, round_.deadline_at_ms - participant.assigned_at_ms))
    quality = quality_of(found.vote, found.why, participant.took_ms, allowed_ms)
    return MeasuredUpdate(
        contribution=contribution(terms, round_, base, found.node, found.update),
        signature=found.update.signature,
        quality_bps=quality.bps,
        evaluator=RULE,
        reason=quality.reason,
    )
