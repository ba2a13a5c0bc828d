"""A point of a sweep as an item: the settings of one small training, done whole by one node.

The training is the job file's work without exchanges: rounds x inner_steps inner steps of one
optimizer on one device. What a job file says of exchanges, pay and trust plays no part.
"""

from typing import Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ParameterValue
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Samples

SWEEP_KIND = "sweep"
SWEEP_WORKLOAD = "workload"
"""Name of the parameter that says which workload all points train: nodes' owners allow it."""
SWEEP_DATA = "data"
"""Name of the index of the job's data folder among a request's files."""
LOSS = "loss"
"""Metric that every workload has."""
METRIC = "metric"
"""Name of the parameter that says which metric is asked for."""
CURVE_POINTS_MOST = 64
"""Measurements of a training at most, beside those before its first and after its last step."""
POINT_BYTES_MOST = 65_536
STEPS_MOST = 10_000_000


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One training of a sweep. Equal points give equal results on a CPU."""

    point: dict[str, ParameterValue]
    """What differs between the points, by dotted keys of a job file."""
    spec: JobSpec
    """All settings, with those of the point."""
    workload_version: int
    steps: int
    """Inner steps to take: those of the spec, or fewer where the point is tried first. Schedules
    are those of all steps either way.
    """

    @property
    def samples(self) -> Samples:
        """Samples that are trained on."""
        return Samples(self.steps * self.spec.training.batch_size)

    @property
    def steps_between(self) -> int:
        """Inner steps between two measurements."""
        rule = self.spec.training.inner_steps * self.spec.evaluation.every
        return max(rule, -(-self.steps // CURVE_POINTS_MOST))


def steps_of(spec: JobSpec) -> int:
    """All inner steps of a training by one node."""
    return spec.training.rounds * spec.training.inner_steps


def read_point(value: Any) -> SweepPoint:
    """Read an item, trusting nothing in it. Whether its settings describe a job is not checked.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is no point of a sweep.
    """
    try:
        point = msgspec.convert(value, SweepPoint, strict=True)
    except msgspec.ValidationError as error:
        detail = f"the item is no point of a sweep: {error}"
        fix = "upgrade the older side"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix) from error
    most_steps = min(STEPS_MOST, steps_of(point.spec))
    if not 0 < point.steps <= most_steps:
        detail = f"the point takes {point.steps} inner steps: 1 to {most_steps} are possible"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return point
