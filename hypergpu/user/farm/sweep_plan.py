"""A sweep as it was checked: its points, each with settings of its own, and how they compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ParameterValue
from hypergpu.farm.sweep_points import LOSS
from hypergpu.jobfile.reading import check_data_folder, data_folder, read_job_file
from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.farm.sweep_grid import (
    PointGrid,
    check_metric,
    grid_points,
    metric_mode,
    point_specs,
)
from hypergpu.user.farm.sweep_rungs import FACTOR_LEAST, FACTOR_MOST

_NO_FACTOR = 0


class SweepPlan(NamedTuple):
    """A sweep that was checked."""

    points: Sequence[Mapping[str, ParameterValue]]
    specs: Sequence[JobSpec]
    """Settings of each point's training."""
    metric: str
    mode: str
    """Whether the metric falls (``min``) or rises (``max``)."""
    factor: int
    """One in so many points goes on to the next rung; 0: all points take all steps."""
    data_folder: Path | None
    """Folder of the job's data; None: the workload brings its own."""

    @property
    def keys(self) -> list[str]:
        """All keys that points set, in order."""
        return list(dict.fromkeys(key for point in self.points for key in point))

    @property
    def seed(self) -> int:
        """The job's seed, as far as points share one."""
        return self.specs[0].training.seed


def sweep_plan(
    spec: JobSpec, grid: PointGrid, folder: Path | None, settings: Mapping[str, Any]
) -> SweepPlan:
    """A sweep, checked.

    Args:
        spec: The job's settings.
        grid: See `sweep`.
        folder: Folder of the job's data; None: it has none.
        settings: ``metric``, ``mode`` and ``stop_early`` of `SweepArguments`.

    Raises:
        HyperGPUError: ARGUMENT_INVALID or SPEC_INVALID, with what would be right.
    """
    metric = settings.get("metric") or LOSS
    factor = settings.get("stop_early", _NO_FACTOR)
    if factor != _NO_FACTOR and not FACTOR_LEAST <= factor <= FACTOR_MOST:
        detail = f"stop_early is {factor}"
        fix = f"give {FACTOR_LEAST} to {FACTOR_MOST}, or 0 for all points to take all steps"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    points = grid_points(grid)
    specs = point_specs(spec, points)
    check_metric(specs, metric)
    return SweepPlan(
        points, specs, metric, metric_mode(metric, settings.get("mode", "")), factor, folder
    )


def job_of_file(path: Path) -> tuple[JobSpec, Path | None]:
    """The settings of a job file, and the folder of its data; None: it has none.

    Raises:
        HyperGPUError: The file describes no job, or its data are not there.
    """
    spec = read_job_file(path)
    check_data_folder(spec, path)
    return spec, data_folder(spec, path.parent) if spec.data.path else None
