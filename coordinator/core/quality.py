"""How good accepted updates were, in basis points, and the records of it: what pay is weighted by.

Theory of operation. When a round is folded, the quality of its updates is known but for a judge's
findings on held-out data, which training does not wait for. Such rounds queue in `Job.unmeasured`.
The front of the queue is recorded (`RoundMeasured`) as soon as its judgement is there or was given
up, together with the event that led to it: a replay gives the same records, each once. A job that
ends within a round measures what it had accepted of that round without folding it. `JobEnded`
follows the last record.

Everything that goes in was measured by the coordinator; nothing a node says of itself does::

    quality = agreement x worth x timeliness

    agreement   of this update: its cosine with the mean of the others', held against the round's
                median; half the median is full marks, since honest updates of different data differ
                that much, and none of it, or less, is zero
    worth       of its node: see below
    timeliness  of this update: time used against the time that the round allowed

Only a sample of updates is judged on held-out data, so a judgement must not count for the update
that was drawn: a node drawn more often would have other pay for equal work. It counts for the node,
beside those of all others. A judged update is a *trial*: its own reduction of the loss, as a part
of its round's. Its mark is that part against half the median of the job's newest trials, and::

    worth = (PRIOR x mean of all marks + sum of the node's own) / (PRIOR + how many are its own)

Nodes of equal work have marks of equal expectation, and so equal worth in expectation, judged often
or never: the mean of all marks stands in for unknown ones. A node that was never judged counts as
average; one that is found worthless again and again approaches zero in every round.

So an update of zeros, of noise or with its sign turned earns nothing. The rule cannot see an update
copied from a neighbour, or work done on other data.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.job.commands import Command, JudgeUpdates, WriteRecord
from coordinator.core.job.events import (
    AggregateReady,
    Event,
    JobEnded,
    MeasuredUpdate,
    RoundMeasured,
    UpdatesJudged,
)
from coordinator.core.job.state import (
    ENDED,
    AcceptedUpdate,
    DueUpdate,
    Job,
    JudgedUpdate,
    Judgement,
    Participant,
    Round,
    Trial,
    UnmeasuredRound,
    WorkState,
)
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


JUDGING_MOST = 2
"""Rounds that wait for the judge. While so many do, further rounds are left unjudged."""


def draw_judged(job: Job, round_: Round) -> tuple[JudgedUpdate, ...]:
    """Updates of a folded round that are judged; none where the job pays nothing.

    The draw depends on the model that the round made, which nobody knew before the updates came.
    """
    count = round_.spec.pay.judged
    is_behind = sum(not waiting.is_ready for waiting in job.unmeasured) >= JUDGING_MOST
    if not (round_.spec.pay.unit_price and count) or is_behind or job.model is None:
        return ()
    drawn = sorted(
        (_lot(job.model.blob.digest, participant), node)
        for node, participant in round_.participants.items()
        if participant.work is WorkState.RECEIVED
    )
    return tuple(_judged_update(node, round_.participants[node]) for _, node in drawn[:count])


def judging_commands(job: Job) -> tuple[JudgeUpdates, ...]:
    """Commands for all rounds that wait for the judge."""
    return tuple(
        JudgeUpdates(
            round=waiting.number,
            base=waiting.base,
            made=waiting.made,
            updates=waiting.judged,
            spec=job.spec,
            manifest=job.manifest,
        )
        for waiting in job.unmeasured
        if not waiting.is_ready
    )


def _lot(model: str, participant: Participant) -> bytes:
    return blake3(f"judged/{model}/{participant.slot}".encode()).digest()


def _judged_update(node: NodeId, participant: Participant) -> JudgedUpdate:
    update = participant.update
    if update is None:
        raise AssertionError("a received update is there")
    return JudgedUpdate(node, update.blob, update.codec)


FULL_MARKS_AT = 0.5
"""The part of the yardstick that earns full marks."""
LATE_LEAST = BasisPoints(5_000)
"""Quality left to a useful update that took twice its time or more."""
UNCLEAR = BasisPoints(5_000)
"""Quality of updates that are compared with no others, where judged ones brought nothing."""
PRIOR = 2
"""A node's worth begins with so many marks that are the mean of all."""
JUDGED_LEAST = 3
"""Least number of judged updates whose median is a yardstick."""
TRIALS_KEPT = 64
"""Number of newest trials that count: older ones are forgotten."""
GAIN_LEAST = 0.05
"""Least gain of a round, as a part of the loss. Where a round gains more, honest updates alone gain
0.1 to 0.8 of that; below it -3 to 4 times as much was measured: chance, not their nodes' worth."""
_PART_MOST = 1_000.0
RULE = "quality/2"


class Worth(NamedTuple):
    """Worth of nodes, from the judged updates of a job."""

    judged: Mapping[NodeId, float]
    """Worth of the nodes that were judged, in [0, 1]."""
    others: float
    """Worth of all other nodes: the mean of all marks."""

    def of(self, node: NodeId) -> float:
        """A node's worth."""
        return self.judged.get(node, self.others)


class UpdateFindings(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one update and its node by the coordinator. Every figure may be missing."""

    agreement: float | None = None
    """Agreement with the others' mean, in [-1, 1]; 0 for an empty update."""
    typical_agreement: float | None = None
    """Median agreement of the round."""
    worth: float | None = None
    """Worth of the node, in [0, 1]."""
    is_round_idle: bool = False
    """The round was judged, and neither it nor a judged update lowered the loss."""
    took_ms: Milliseconds = Milliseconds(0)
    """From the assignment to the update's last byte, by the coordinator's clock."""
    allowed_ms: Milliseconds = Milliseconds(0)
    """Time from the assignment to the round's deadline; 0: it has none."""


class Quality(msgspec.Struct, frozen=True):
    """A quality with its origin."""

    bps: BasisPoints
    evaluator: str
    """Short name of the rule and its measurements; its Keccak-256 goes into the receipt."""
    reason: str


def judged_trial(node: NodeId, gain: float, round_gain: float, base_loss: float) -> Trial | None:
    """Trial of a node by one judgement; None where the round did not gain enough to tell.

    Args:
        node: Node of the judged update.
        gain: Reduction of the loss by it alone; not finite where the loss with it is not.
        round_gain: Reduction of the loss by the whole round.
        base_loss: Loss before both.
    """
    if not math.isfinite(gain):
        return Trial(node, 0.0)
    least = GAIN_LEAST * abs(base_loss)
    if not (math.isfinite(round_gain) and math.isfinite(least) and round_gain > least):
        return None
    return Trial(node, min(_PART_MOST, max(0.0, gain / round_gain)))


def worth_from_trials(trials: Sequence[Trial]) -> Worth | None:
    """The worth of every node by the newest trials of a job; None where they do not tell.

    Args:
        trials: Oldest first; all but the newest `TRIALS_KEPT` are passed over.
    """
    newest = trials[-TRIALS_KEPT:]
    usual = median(each.part for each in newest) if len(newest) >= JUDGED_LEAST else 0.0
    if usual <= 0:
        return None
    marks: dict[NodeId, list[float]] = {}
    for each in newest:
        marks.setdefault(each.node, []).append(_mark(each.part, usual))
    mean = math.fsum(mark for own in marks.values() for mark in own) / len(newest)
    judged = {
        node: (PRIOR * mean + math.fsum(own)) / (PRIOR + len(own)) for node, own in marks.items()
    }
    return Worth(judged, mean)


def quality_of(measured: UpdateFindings) -> Quality:
    """The quality of an accepted update.

    Bounded by 0 and 10,000. A higher agreement or worth, or less time, never lowers it.
    """
    agreed, why_agreed = _agreement_bps(measured)
    worth, why_worth = _worth_bps(measured, is_alone=agreed is None)
    in_time, why_late = _time_bps(measured)
    substance = int(WHOLE_BPS)
    for part in (agreed, worth):
        substance = substance if part is None else substance * part // WHOLE_BPS
    names = [
        name for name, part in (("agreement", agreed), ("held-out", worth)) if part is not None
    ]
    reasons = [why for why in (why_agreed, why_worth, why_late) if why]
    return Quality(
        bps=BasisPoints(substance * in_time // WHOLE_BPS),
        evaluator=f"{RULE} {'+'.join(names) or 'unmeasured'}",
        reason="; ".join(reasons) or "nothing to compare it with",
    )


def _agreement_bps(measured: UpdateFindings) -> tuple[int | None, str]:
    own, typical = measured.agreement, measured.typical_agreement
    if own is None or typical is None or not math.isfinite(typical) or typical <= 0:
        return None, ""
    marks = int(WHOLE_BPS * _mark(own, typical))
    return marks, f"agrees by {own:.3g} where the round's median is {typical:.3g}"


def _worth_bps(measured: UpdateFindings, *, is_alone: bool) -> tuple[int | None, str]:
    worth = measured.worth
    if is_alone and measured.is_round_idle:
        return UNCLEAR, "neither it nor its round lowered the held-out loss"
    if worth is None or not math.isfinite(worth):
        return None, ""
    bounded = min(1.0, max(0.0, worth))
    return int(WHOLE_BPS * bounded), f"its node's judged updates are worth {bounded:.0%}"


def _time_bps(measured: UpdateFindings) -> tuple[int, str]:
    allowed = measured.allowed_ms
    late = measured.took_ms - allowed
    if allowed <= 0 or late <= 0:
        return WHOLE_BPS, ""
    lost = (WHOLE_BPS - LATE_LEAST) * min(late, allowed) // allowed
    return WHOLE_BPS - lost, f"{late} ms after the deadline"


def _mark(own: float, yardstick: float) -> float:
    """A mark in [0, 1], full from `FULL_MARKS_AT` of a yardstick above 0 on."""
    if not math.isfinite(own):
        return 0.0
    share = own / (yardstick * FULL_MARKS_AT) if yardstick * FULL_MARKS_AT else math.inf
    return min(1.0, max(0.0, share))


Trials = tuple[Trial, ...]


def add_trials(trials: Trials, waiting: UnmeasuredRound) -> Trials:
    """The job's trials with those of a judged round; the oldest are forgotten."""
    judgement = waiting.judgement
    if judgement is None or judgement.base_loss is None:
        return trials
    base, whole = judgement.base_loss, _round_gain(judgement)
    found = (judged_trial(node, gain, whole, base) for node, gain in _gains(waiting).items())
    return (*trials, *(trial for trial in found if trial is not None))[-TRIALS_KEPT:]


def update_qualities(waiting: UnmeasuredRound, trials: Trials) -> dict[NodeId, Quality]:
    """The quality of each update of a round, from its own findings and its node's trials.

    Args:
        waiting: The round, with its judgement where it has one.
        trials: The job's, those of this round included.
    """
    known = [due.agreement for due in waiting.due.values() if due.agreement is not None]
    typical = median(known) if known else None
    worth = worth_from_trials(trials)
    is_idle = _is_idle(waiting)
    return {
        node: quality_of(
            UpdateFindings(
                agreement=due.agreement,
                typical_agreement=typical,
                worth=None if worth is None else worth.of(node),
                is_round_idle=is_idle,
                took_ms=due.took_ms,
                allowed_ms=due.allowed_ms,
            )
        )
        for node, due in waiting.due.items()
    }


def _gains(waiting: UnmeasuredRound) -> dict[NodeId, float]:
    """Reduction of the loss by each judged update alone; minus infinity where it is not finite."""
    judgement = waiting.judgement
    if judgement is None or judgement.base_loss is None:
        return {}
    return {
        update.node: judgement.base_loss - judgement.losses.get(update.node, math.inf)
        for update in waiting.judged
    }


def _is_idle(waiting: UnmeasuredRound) -> bool:
    """Whether the round was judged and neither it nor a judged update lowered the loss."""
    if waiting.judgement is None or not (gains := _gains(waiting)):
        return False
    whole = _round_gain(waiting.judgement)
    return not whole > 0 and all(gain <= 0 for gain in gains.values())


def _round_gain(judgement: Judgement) -> float:
    """Reduction of the loss by the whole round; not a number where it is not known."""
    if judgement.base_loss is None or judgement.made_loss is None:
        return math.nan
    return judgement.base_loss - judgement.made_loss


QUEUE_MOST = 8
"""A judge that holds up so many rounds is not waited for any longer."""


def record_quality(before: Job, event: Event, job: Job) -> tuple[Job, tuple[Command, ...]]:
    """Queue what a step closed or a judge found, and record what is final.

    Args:
        before: The job before the event.
        event: A legal event.
        job: The job as the round machine left it.

    Returns:
        The job, with commands that judge updates or write records.
    """
    if job.is_over:
        return job, ()
    commands: tuple[Command, ...] = ()
    if isinstance(event, AggregateReady) and not before.lost_model:
        job = _queue_folded(job, event.agreements)
        commands = judging_commands(job)[-1:] if job.unmeasured[-1].judged else ()
    elif isinstance(event, UpdatesJudged):
        job = _add_judgement(job, event)
    if job.phase in ENDED and before.phase not in ENDED:
        job = _queue_open_round(job)
    job, records = _record_ready(job)
    if job.phase in ENDED and not job.unmeasured:
        end = JobEnded(at_ms=job.at_ms, phase=job.phase.value, reason=job.reason)
        records = (*records, WriteRecord(end))
        job = replace(job, is_over=True)
    return job, (*commands, *records)


def _queue_folded(job: Job, agreements: dict[NodeId, float]) -> Job:
    """Queue the round that has just become a model."""
    round_, base, made = job.closed, job.previous, job.model
    if round_ is None or base is None or made is None:
        raise AssertionError("a folded round has made a model")
    due = _due_updates(job, round_, base.blob.digest, agreements)
    judged = draw_judged(job, round_)
    waiting = UnmeasuredRound(round_.number, base.blob, made.blob, due, judged)
    return replace(job, unmeasured=(*job.unmeasured, waiting))


def _queue_open_round(job: Job) -> Job:
    """Queue what an ended job accepted in the round that it never folds."""
    round_, model = job.round, job.model
    if round_ is None or model is None:
        return job
    if not (due := _due_updates(job, round_, model.blob.digest, {})):
        return job
    waiting = UnmeasuredRound(round_.number, model.blob, model.blob, due)
    return replace(job, unmeasured=(*job.unmeasured, waiting))


def _add_judgement(job: Job, event: UpdatesJudged) -> Job:
    judgement = Judgement(event.base_loss, event.made_loss, event.losses)
    queue = tuple(
        replace(waiting, judgement=judgement) if waiting.number == event.round else waiting
        for waiting in job.unmeasured
    )
    return replace(job, unmeasured=queue)


def _record_ready(job: Job) -> tuple[Job, tuple[Command, ...]]:
    """Record rounds from the front of the queue until one waits for a judge."""
    queue, trials = job.unmeasured, job.trials
    records: list[Command] = []
    while queue and (queue[0].is_ready or len(queue) > QUEUE_MOST):
        waiting, queue = queue[0], queue[1:]
        trials = add_trials(trials, waiting)
        found = update_qualities(waiting, trials)
        updates = tuple(
            MeasuredUpdate(
                contribution=due.contribution,
                signature=due.signature,
                quality_bps=found[node].bps,
                evaluator=found[node].evaluator,
                reason=found[node].reason,
            )
            for node, due in waiting.due.items()
        )
        record = RoundMeasured(at_ms=job.at_ms, round=waiting.number, updates=updates)
        records.append(WriteRecord(record))
    return replace(job, unmeasured=queue, trials=trials), tuple(records)


def _due_updates(
    job: Job, round_: Round, base: Digest, agreements: dict[NodeId, float]
) -> dict[NodeId, DueUpdate]:
    received = [
        (participant.slot, node, participant, participant.update)
        for node, participant in round_.participants.items()
        if participant.work is WorkState.RECEIVED and participant.update is not None
    ]
    return {
        node: DueUpdate(
            contribution=contribution(job.terms, round_, base, node, update),
            signature=update.signature,
            took_ms=participant.took_ms,
            allowed_ms=_allowed_ms(round_, participant.assigned_at_ms),
            agreement=agreements.get(node),
        )
        for _, node, participant, update in sorted(received, key=lambda each: each[:2])
    }


def _allowed_ms(round_: Round, assigned_at_ms: Milliseconds) -> Milliseconds:
    return Milliseconds(max(0, round_.deadline_at_ms - assigned_at_ms))
