"""How good an accepted update was, in basis points: the rule that pay is weighted by.

Everything that goes in was measured by the coordinator; nothing a node says of itself does. Two
views of the update's substance, whichever there are, are averaged, and lateness takes from them::

    agreement   cosine with the mean of the others' updates, held against the round's median
    gain        held-out loss of the model less that with this update alone applied, held against
                what the whole round gained; only a sample of updates is judged so
    lateness    time used against the time that the round allowed

Half of the yardstick is full marks, since honest updates of different data differ that much; none
of it, or less, is zero. So an update of zeros, of noise or with its sign turned earns nothing. What
the rule cannot see: an update copied from a neighbour, or work done on other data.
"""

import math

import msgspec

from hypergpu.ledger.pay import WHOLE_BPS
from hypergpu.units import BasisPoints, Milliseconds

FULL_MARKS_AT = 0.5
"""The part of the yardstick that earns full marks."""
LATE_LEAST = BasisPoints(5_000)
"""What remains of an update's quality that took twice its time or more, and was still of use."""
UNCLEAR = BasisPoints(5_000)
"""What was judged and brought nothing, in a round that brought nothing either."""
RULE = "quality/1"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator measured of one update. Every figure may be missing."""

    agreement: float | None = None
    """In [-1, 1]; 0 of an update without content."""
    typical_agreement: float | None = None
    """The median of the round's."""
    gain: float | None = None
    """In units of loss."""
    round_gain: float | None = None
    """Of the round's aggregate, on the same samples."""
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


def quality_of(measured: Measured) -> Quality:
    """The quality of an accepted update.

    Bounded by 0 and 10,000. A higher agreement or gain, or less time, never lowers it.
    """
    agreed, why_agreed = _agreement_bps(measured)
    gained, why_gained = _gain_bps(measured, is_alone=agreed is None)
    in_time, why_late = _time_bps(measured)
    parts = [part for part in (agreed, gained) if part is not None]
    substance = sum(parts) // len(parts) if parts else WHOLE_BPS
    names = [
        name for name, part in (("agreement", agreed), ("held-out", gained)) if part is not None
    ]
    reasons = [why for why in (why_agreed, why_gained, why_late) if why]
    return Quality(
        bps=BasisPoints(substance * in_time // WHOLE_BPS),
        evaluator=f"{RULE} {'+'.join(names) or 'unmeasured'}",
        reason="; ".join(reasons) or "nothing to compare it with",
    )


def _agreement_bps(measured: Measured) -> tuple[int | None, str]:
    own, typical = measured.agreement, measured.typical_agreement
    if own is None or typical is None or not math.isfinite(typical) or typical <= 0:
        return None, ""
    return _marks(own, typical), f"agrees by {own:.3g} where the round's median is {typical:.3g}"


def _gain_bps(measured: Measured, *, is_alone: bool) -> tuple[int | None, str]:
    own, whole = measured.gain, measured.round_gain
    if own is None:
        return None, ""
    if not math.isfinite(own):
        return 0, "the loss with it is not finite"
    if whole is not None and math.isfinite(whole) and whole > 0:
        return _marks(
            own, whole
        ), f"lowers the held-out loss by {own:.3g}, the round by {whole:.3g}"
    if not is_alone:
        return None, "the round itself lowered no loss"
    if own > 0:
        return WHOLE_BPS, f"lowers the held-out loss by {own:.3g}"
    return UNCLEAR, f"changes the held-out loss by {-own:.3g}, and so does the round"


def _time_bps(measured: Measured) -> tuple[int, str]:
    allowed = measured.allowed_ms
    late = measured.took_ms - allowed
    if allowed <= 0 or late <= 0:
        return WHOLE_BPS, ""
    lost = (WHOLE_BPS - LATE_LEAST) * min(late, allowed) // allowed
    return WHOLE_BPS - lost, f"{late} ms after the deadline"


def _marks(own: float, yardstick: float) -> int:
    """Basis points of ``own``, full from `FULL_MARKS_AT` of a yardstick above 0 on."""
    if not math.isfinite(own):
        return 0
    share = own / (yardstick * FULL_MARKS_AT) if yardstick * FULL_MARKS_AT else math.inf
    return int(WHOLE_BPS * min(1.0, max(0.0, share)))
