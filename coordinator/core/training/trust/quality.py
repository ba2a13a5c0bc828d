"""How good accepted updates were, in basis points, and the records of it: what pay is weighted by.

Everything that goes in was measured by the coordinator; nothing a node says of itself does::

    quality = share x timeliness

    share       of full pay: its honesty, see `honesty`; in jobs of older versions, and where data
                stay on nodes, its share of a full vote in the fold, see `weights`
    timeliness  time used against the time that the round allowed

A round is measured (`RoundMeasured`) with the event that made a model of it. A job that ends within
a round measures what it had accepted of that round without folding it. `JobEnded` follows the last
record.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.job.commands import Command
from coordinator.core.training.job.events import (
    AggregateReady,
    Event,
    MeasuredUpdate,
    RoundMeasured,
)
from coordinator.core.training.job.state import (
    ENDED,
    AcceptedUpdate,
    Job,
    Model,
    Participant,
    Round,
)
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.trust.pay_share import known_pay
from coordinator.core.training.trust.weights import WHOLE
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.ids import Digest, NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.statements import WHOLE_BPS, Contribution, shard_digest
from hypergpu.units import BasisPoints, Milliseconds, Samples


def offered_contribution(job: Job, node: NodeId, update: AcceptedUpdate) -> Contribution:
    """Contribution that a participant of the open round signs for an update that it offers."""
    participant = job.participant(node)
    if participant is None or job.model is None:
        raise AssertionError("a contribution belongs to an open round")
    origin = _origin(participant, job.round, job.model)
    return contribution(job.terms, origin, node, participant, update)


class _Origin(NamedTuple):
    """What a contribution's work was given out with."""

    round: int
    epoch: int
    """Billed in, unless its node has signed for another."""
    model: Digest


def _origin(participant: Participant, round_: Round | None, base: Model) -> _Origin:
    """Origin of a participant's work, in a round that started from the model ``base``."""
    if (own := participant.base) is not None:
        return _Origin(own.round, own.epoch, _given_digest(own.model, participant))
    if round_ is None:
        raise AssertionError("a contribution belongs to an open round")
    return _Origin(round_.number, round_.epoch, _given_digest(base, participant))


def _given_digest(model: Model, participant: Participant) -> Digest:
    """The model, or the part of it, that the participant was given."""
    part = model.part(participant.experts)
    return model.blob.digest if part is None else part.blob.digest


def contribution(
    terms: Terms, origin: _Origin, node: NodeId, participant: Participant, update: AcceptedUpdate
) -> Contribution:
    """Contribution of a participant.

    Samples and inner steps are those that the coordinator assigned, whatever the node states.
    """
    shard = participant.shard
    return Contribution(
        job=terms.job,
        epoch=origin.epoch if update.epoch is None else update.epoch,
        round=origin.round,
        node=node,
        shard=shard_digest(shard.partition, ((run.start, run.count) for run in shard.ranges)),
        model=origin.model,
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
    lost_bps = (WHOLE_BPS - LATE_LEAST) * min(late, allowed_ms) // allowed_ms
    return WHOLE_BPS - lost_bps, f"{late} ms after the deadline"


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
    accepted_updates = round_.accepted_updates
    counted_round = _Counted(round_.number, round_, base, accepted_updates)
    return (_record(job, counted_round, round_.weighing),)


def _measure_open(job: Job) -> tuple[Command, ...]:
    """Measure what an ended job accepted and never folds: of the round that was open, and of leases
    over several rounds.
    """
    round_, model = job.round, job.model
    accepted_updates = list(round_.accepted_updates) if round_ is not None else []
    accepted_updates += [
        (node, each, each.update) for node, each in job.long_leases.items() if each.update
    ]
    if model is None or not accepted_updates:
        return ()
    number = round_.number if round_ is not None else model.round
    counted_round = _Counted(number, round_, model, accepted_updates)
    return (_record(job, counted_round, None),)


class _Counted(NamedTuple):
    """Updates whose quality is recorded together."""

    round: int
    opened: Round | None
    """None: the job ended between two rounds."""
    base: Model
    updates: list[tuple[NodeId, Participant, AcceptedUpdate]]


def _record(job: Job, counted: _Counted, weighing: Weighing | None) -> WriteRecord:
    votes, reasons = _votes(job, [node for node, _, _ in counted.updates], weighing)
    measurements = tuple(
        _measured_update(job.terms, counted, counted_update)
        for counted_update in (
            _CountedUpdate(node, part, update, votes.get(node, WHOLE), reasons.get(node, ""))
            for node, part, update in counted.updates
        )
    )
    return WriteRecord(RoundMeasured(at_ms=job.at_ms, round=counted.round, updates=measurements))


def _votes(
    job: Job, nodes: list[NodeId], weighing: Weighing | None
) -> tuple[Mapping[NodeId, int], Mapping[NodeId, str]]:
    """What the fold found, and where nothing was folded, what is known of each node."""
    if weighing is not None:
        reasons = weighing.reasons if weighing.pay is None else weighing.pay_reasons
        if weighing.no_evidence:
            reasons = {node: reasons.get(node, NO_EVIDENCE) for node in nodes}
        return weighing.pay_shares, reasons
    votes = known_pay(job.trust, nodes)
    return votes, {node: "its earlier updates" for node, vote in votes.items() if vote < WHOLE}


class _CountedUpdate(NamedTuple):
    node: NodeId
    participant: Participant
    update: AcceptedUpdate
    vote: int
    why: str


def _measured_update(terms: Terms, counted: _Counted, found: _CountedUpdate) -> MeasuredUpdate:
    participant = found.participant
    is_awaited = participant.base is None and counted.opened is not None
    deadline_at_ms = counted.opened.deadline_at_ms if counted.opened and is_awaited else 0
    allowed_ms = Milliseconds(max(0, deadline_at_ms - participant.assigned_at_ms))
    quality = quality_of(found.vote, found.why, participant.took_ms, allowed_ms)
    origin = _origin(participant, counted.opened, counted.base)
    return MeasuredUpdate(
        contribution=contribution(terms, origin, found.node, participant, found.update),
        signature=found.update.signature,
        quality_bps=quality.bps,
        evaluator=RULE,
        reason=quality.reason,
    )
