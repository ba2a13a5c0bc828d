"""How good an accepted update was, in basis points: the rule that pay is weighted by.

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

from coordinator.core.job.state import Trial
from hypergpu.ids import NodeId
from hypergpu.statements.receipt import WHOLE_BPS
from hypergpu.units import BasisPoints, Milliseconds

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


def trial_of(node: NodeId, gain: float, round_gain: float, base_loss: float) -> Trial | None:
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


def worth_by(trials: Sequence[Trial]) -> Worth | None:
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
