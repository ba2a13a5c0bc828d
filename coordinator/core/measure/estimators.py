"""How a quantity that wanders is followed: a mean and a mean deviation that outliers hardly move
and that a new level takes two or three observations to convince.

Jacobson 1988 (RFC 6298) with two additions. An observation further off than four deviations counts
as four deviations, so that a settled mean moves by half a deviation at most, however absurd the
observation is. And evidence that the level has changed is added up as in a CUSUM chart (Page 1954):
two observations beyond the limit on the same side, or more of them that are less far off, and the
estimate starts again from the newest two, the one that claims less. All that is compared are
ratios: a line that became ten times faster is as much of a surprise as one ten times slower.
"""

from math import inf, log

import msgspec

from coordinator.core.measure.reading import Estimate
from hypergpu.units import Milliseconds

MEAN_GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
"""Both of RFC 6298, once there are enough observations; the first few are averaged."""
DEVIATION_LOSS = 1 / 8
"""The same while observations are closer than usual. With RFC 6298's own gain a few close ones in
a row make the next one a surprise: every hundredth of normal noise of 20 % passed for a new level.
"""
SURPRISE = 4.0
"""Deviations from the mean beyond which an observation is clipped."""
STEADY_SHARE = 0.05
"""Least deviation over the mean, as no line is too steady to vary."""
NEW_LEVEL = 4.5
"""Evidence from which on the level is a new one: two surprises make 6. Half of it must have been
there before, so that no single observation convinces.
"""


def update_estimate(
    estimate: Estimate, value: float, at_ms: Milliseconds, *, weight: float = 1.0
) -> Estimate:
    """The estimate after one more observation.

    Args:
        estimate: Of a positive quantity.
        value: Observed; what is not positive is passed over.
        at_ms: When. An older observation than the newest counts, but makes nothing newer.
        weight: How far it is to be believed, in [0, 1]; 0 changes nothing.
    """
    if not 0 < value < inf or weight <= 0:
        return estimate
    if not estimate.count:
        # RFC 6298 begins with half; what is hardly believed may be off by all of itself.
        return Estimate(value, value * (1 - min(1.0, weight) / 2), 1, at_ms, newest=value)
    newest_ms = max(at_ms, estimate.at_ms)
    surprise = _surprise(estimate, value)
    drift = _drift(estimate.drift, surprise, weight)
    if min(abs(drift), 2 * abs(estimate.drift)) >= NEW_LEVEL and drift * estimate.drift > 0:
        level = min(
            value, estimate.newest or value, key=lambda each: abs(log(each / estimate.mean))
        )
        # If that claims too little, one more surprise is enough.
        left = NEW_LEVEL / 2 if drift > 0 else -NEW_LEVEL / 2
        return Estimate(level, level / 2, 1, newest_ms, drift=left, newest=value)
    off = _clip(estimate, value) - estimate.mean
    seen = estimate.count + 1
    mean_gain = weight * max(MEAN_GAIN, 1 / seen)
    gain = DEVIATION_GAIN if abs(off) > estimate.deviation else DEVIATION_LOSS
    deviation_gain = weight * max(gain, 1 / seen)
    return Estimate(
        mean=estimate.mean + mean_gain * off,
        deviation=estimate.deviation + deviation_gain * (abs(off) - estimate.deviation),
        count=seen,
        at_ms=newest_ms,
        drift=drift,
        newest=value,
    )


def update_rate(
    estimate: Estimate, value: float, at_ms: Milliseconds, *, weight: float = 1.0
) -> Estimate:
    """The same for a rate, whose mean is harmonic: what is averaged is the time of one unit."""
    if not 0 < value < inf:
        return estimate
    return inverse(update_estimate(inverse(estimate), 1 / value, at_ms, weight=weight))


def inverse(estimate: Estimate) -> Estimate:
    """Estimate of one over the quantity; twice gives it back."""
    if not estimate.count:
        return estimate
    mean = 1 / estimate.mean
    return msgspec.structs.replace(
        estimate,
        mean=mean,
        deviation=estimate.deviation * mean * mean,
        drift=-estimate.drift,
        newest=1 / estimate.newest if estimate.newest else 0.0,
    )


def laplace_quantile(mean: float, deviation: float, share: float) -> float:
    """The value that this share of observations stays under, never negative.

    Above the mean it is that of a Laplace distribution. Below, it is as many times less than the
    mean as the opposite quantile is more, which makes a rate's the inverse of its time's.

    Args:
        mean: Of a positive quantity.
        deviation: Its mean deviation.
        share: In (0, 1).
    """
    if mean <= 0:
        return 0.0
    beyond = deviation * -log(2 * min(share, 1 - share))
    return mean + beyond if share >= 0.5 else mean * mean / (mean + beyond)


def age_ms(estimate: Estimate, now_ms: Milliseconds) -> Milliseconds | None:
    """Since the newest observation; None: there is none."""
    return Milliseconds(max(0, now_ms - estimate.at_ms)) if estimate.count else None


def _limit(estimate: Estimate) -> float:
    """How many times the mean an observation may be without being clipped."""
    return 1 + SURPRISE * max(estimate.deviation / estimate.mean, STEADY_SHARE)


def _clip(estimate: Estimate, value: float) -> float:
    limit = _limit(estimate)
    return min(max(value, estimate.mean / limit), estimate.mean * limit)


def _surprise(estimate: Estimate, value: float) -> float:
    """How far off an observation is, in deviations; below the mean negative, by ratio alike."""
    times = max(value / estimate.mean, estimate.mean / value) - 1
    off = min(SURPRISE, SURPRISE * times / (_limit(estimate) - 1))
    return off if value >= estimate.mean else -off


def _drift(before: float, surprise: float, weight: float) -> float:
    """Evidence after one more observation: what is to be expected is no evidence, and one
    observation on the other side refutes all there was.
    """
    found = weight * max(0.0, abs(surprise) - 1)
    if surprise >= 0:
        return max(0.0, before) + found
    return min(0.0, before) - found
