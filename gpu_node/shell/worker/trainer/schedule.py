"""The inner learning rate, indexed by the samples that the whole job has processed.

Steps of one node would be the wrong index: nodes join late, die and take different numbers of
steps.
"""

import math
from typing import NamedTuple

from hypergpu.units import Samples


class Schedule(NamedTuple):
    """How the rate moves over the job."""

    peak: float
    shape: str = "constant"
    """``constant``, or ``cosine``: down to zero at ``total_samples``."""
    warmup_samples: Samples = Samples(0)
    """The rate rises linearly from zero over these."""
    total_samples: Samples = Samples(0)


def learning_rate(schedule: Schedule, processed: Samples) -> float:
    """The rate of the step that brings the job to ``processed`` samples."""
    rate = schedule.peak
    if schedule.warmup_samples > 0:
        rate *= min(1.0, processed / schedule.warmup_samples)
    if schedule.shape == "cosine" and schedule.total_samples > 0:
        rate *= 0.5 * (1.0 + math.cos(math.pi * min(1.0, processed / schedule.total_samples)))
    return rate
