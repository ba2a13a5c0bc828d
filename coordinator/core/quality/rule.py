"""How good an accepted update was, in basis points: the rule that pay is weighted by.

Everything that goes in was measured by the coordinator; nothing a node says of itself does::

    quality = agreement x worth x timeliness

    agreement   of this update: its cosine with the mean of the others', held against the round's
                median; half the median is full marks, since honest updates of different data differ
                that much, and none of it, or less, is zero
    worth       of its node: see below
    timeliness  of this update: time used against the time that the round allowed

Only a sample of updates is judged on held-out data, so a judgement must not count for the update
that was drawn: whoever is drawn more often would have other pay for equal work. It counts for the
node, beside everybody's. A judged update is a *trial*: what it alone took off the loss, as a part
of what its round did. Its mark is that part against half the median of the job's newest trials,
and::

    worth = (PRIOR x mean of all marks + sum of the node's own) / (PRIOR + how many are its own)

Nodes of equal work have marks of equal expectation, and so equal worth in expectation, judged
often or never: the mean of all marks stands in for what is not known. Whoever has not been judged
is taken for the average; whoever is found worthless again and again comes to nothing in every
round.

So an update of zeros, of noise or with its sign turned earns nothing. What the rule cannot see: an
update copied from a neighbour, or work done on other data.
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
"""What remains of an update's quality that took twice its time or more, and was still of use."""
UNCLEAR = BasisPoints(5_000)
"""Where updates are compared with no others, and what was judged brought nothing."""
PRIOR = 2
"""A node's worth begins with so many marks that are the mean of all."""
JUDGED_LEAST = 3
"""Of fewer judged updates there is no telling what is usual."""
TRIALS_KEPT = 64
"""The newest: what a node did long ago is forgotten."""
GAIN_LEAST = 0.05
"""Of the loss. Where a round gains more, honest updates alone do 0.1 to 0.8 of that; where it gains
less, -3 to 4 times as much was measured of them: chance, which says nothing of their nodes."""
_PART_MOST = 1_000.0
RULE = "quality/2"


class Worth(NamedTuple):
    """What judged updates of a job come to."""

    judged: Mapping[NodeId, float]
    """In [0, 1], of the nodes that were judged."""
    others: float
    """Of everybody else: the mean of all marks."""

    def of(self, node: NodeId) -> float:
        """A node's worth."""
        return self.judged.get(node, self.others)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator measured of one update and its node. Every figure may be missing."""

    agreement: float | None = None
    """In [-1, 1]; 0 of an update without content."""
    typical_agreement: float | None = None
    """The median of the round's."""
    worth: float | None = None
    """Of the node, in [0, 1]."""
    is_round_idle: bool = False
    """The round was judged, and neither it nor what was judged of it lowered the loss."""
    took_ms: Milliseconds = Milliseconds(0)
    """From the assignment to the update's last byte, by the coordinator's clock."""
    allowed_ms: Milliseconds = Milliseconds(0)
    """Until the round's deadline; 0: it has none."""


class Quality(msgspec.Struct, frozen=True):
    """A quality with where it comes from."""

    bps: BasisPoints
    evaluator: str
    """A short name of what measured it; its Keccak-256 goes into the receipt."""
    reason: str


def trial_of(node: NodeId, gain: float, round_gain: float, base_loss: float) -> Trial | None:
    """What a judgement says of a node; None where the round did not gain enough to tell.

    Args:
        node: Whose update was judged.
        gain: What it alone took off the loss; not finite where the loss with it is not.
        round_gain: What the whole round did.
        base_loss: Before both.
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


def quality_of(measured: Measured) -> Quality:
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


def _agreement_bps(measured: Measured) -> tuple[int | None, str]:
    own, typical = measured.agreement, measured.typical_agreement
    if own is None or typical is None or not math.isfinite(typical) or typical <= 0:
        return None, ""
    marks = int(WHOLE_BPS * _mark(own, typical))
    return marks, f"agrees by {own:.3g} where the round's median is {typical:.3g}"


def _worth_bps(measured: Measured, *, is_alone: bool) -> tuple[int | None, str]:
    worth = measured.worth
    if is_alone and measured.is_round_idle:
        return UNCLEAR, "neither it nor its round lowered the held-out loss"
    if worth is None or not math.isfinite(worth):
        return None, ""
    bounded = min(1.0, max(0.0, worth))
    return int(WHOLE_BPS * bounded), f"its node's judged updates are worth {bounded:.0%}"


def _time_bps(measured: Measured) -> tuple[int, str]:
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
