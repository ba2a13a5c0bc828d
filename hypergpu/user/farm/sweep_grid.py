"""Points of a sweep: each combination of a grid, or a list, checked as jobs of their own."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ParameterValue
from hypergpu.farm.sweep_points import LOSS, STEPS_MOST, SweepPoint, steps_of
from hypergpu.jobfile.keys import ALIASES, KEYS
from hypergpu.jobfile.reading import read_spec
from hypergpu.jobfile.rules import spec_problems
from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.toml import JobFileError, KeyLines, nearest
from hypergpu.workloads.metrics import FALLS, RISES, direction
from hypergpu.workloads.registry import find

POINTS_MOST = 10_000
PointValues = Mapping[str, ParameterValue]
PointGrid = Mapping[str, Sequence[ParameterValue]] | Sequence[PointValues]
"""Values by dotted key, of which every combination is a point; or the points themselves."""

_OPTIONS = "options."
_VARIED = frozenset(
    key for key in KEYS if key.startswith(("inner.", "training.")) and key != "training.nodes"
)
_DATA_PATH = "data"
"""Stands for the user's own path, which is nobody else's business."""


def grid_points(grid: PointGrid) -> list[dict[str, ParameterValue]]:
    """The points of a grid in order: the last key varies fastest.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, a key or value is none that may be, a point occurs twice,
            or there are none or too many.
    """
    rows = _combinations(grid) if isinstance(grid, Mapping) else list(grid)
    if not 0 < len(rows) <= POINTS_MOST:
        raise _wrong(f"the sweep has {len(rows)} points", f"give 1 to {POINTS_MOST}")
    points = [_checked_point(row) for row in rows]
    texts = [msgspec.json.encode(point, order="sorted") for point in points]
    for place, text in enumerate(texts):
        if (first := texts.index(text)) != place:
            detail = f"the points {first} and {place} are equal: {text.decode()}"
            raise _wrong(detail, "leave one of both out")
    return points


def _combinations(grid: Mapping[str, Sequence[ParameterValue]]) -> list[dict[str, ParameterValue]]:
    for key, values in grid.items():
        if not _is_list(values):
            raise _wrong(f"the grid's {key} is no list of values", f"give {key} a list")
    count = math.prod(len(values) for values in grid.values()) if grid else 0
    if count > POINTS_MOST:
        raise _wrong(f"the grid has {count} points", f"give {POINTS_MOST} at most")
    return [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if grid
    ]


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0


def _checked_point(row: PointValues) -> dict[str, ParameterValue]:
    point: dict[str, ParameterValue] = {}
    for word, value in row.items():
        key = ALIASES.get(word, word)
        if key in point:
            raise _wrong(f"a point sets {key} twice", "keep one of the two")
        if key not in _VARIED and not key.startswith(_OPTIONS):
            raise _wrong(*_unknown_key(key))
        if not isinstance(value, ParameterValue):
            detail = f"the value of {key} is {type(value).__name__}"
            raise _wrong(detail, "give texts, numbers, true or false")
        point[key] = value
    return point


def _unknown_key(key: str) -> tuple[str, str]:
    if key in KEYS:
        detail = f"{key} plays no part in a sweep: each point is one training by one node"
        return (
            detail,
            "vary inner.*, options.*, or training's rounds, steps, batch size, seed",
        )
    near_key = nearest(key, (*sorted(_VARIED), *ALIASES))
    fix = f"did you mean {near_key}?" if near_key else "name a key of the job file: docs/jobs.md"
    return f"there is no key {key!r} to vary", fix


def point_specs(spec: JobSpec, points: Sequence[PointValues]) -> list[JobSpec]:
    """The settings of each point's training.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the job is none whose points one node can train.
        JobFileError: A point describes no job.
    """
    _check_job(spec)
    workload = find(spec.workload)
    if workload.kind == "null":
        raise _wrong(f"workload {workload.name} trains nothing", "sweep another")
    return [_point_spec(spec, point) for point in points]


def _check_job(spec: JobSpec) -> None:
    if spec.data.stays_on_nodes:
        detail = "the job's data stay on nodes, and each point needs all of them"
        raise _wrong(detail, 'sweep a job with source = "shared"')
    if spec.model.init:
        raise _wrong("the job begins with weights of its own", "leave model.init out")


def _point_spec(spec: JobSpec, point: PointValues) -> JobSpec:
    tree: dict[str, Any] = msgspec.to_builtins(spec)
    for key, value in point.items():
        table, _, name = key.partition(".")
        tree[table][name] = value
    result, problems = read_spec(tree, KeyLines(f"point {dict(point)}"))
    known_keys = {each.key for each in problems}
    problems += [each for each in spec_problems(result) if each.key not in known_keys]
    if problems:
        where = f"point {msgspec.json.encode(dict(point)).decode()}"
        raise JobFileError(
            msgspec.structs.replace(each, where=f"{where} {each.key}") for each in problems
        )
    steps = steps_of(result)
    if steps > STEPS_MOST:
        raise _wrong(f"a point takes {steps} inner steps", f"give {STEPS_MOST} at most")
    if result.data.path:
        shown_data = msgspec.structs.replace(result.data, path=_DATA_PATH)
        result = msgspec.structs.replace(result, data=shown_data)
    return result


def sweep_point(spec: JobSpec, point: PointValues, steps: int) -> SweepPoint:
    """A point as its item has it.

    Args:
        spec: The point's own, see `point_specs`.
        point: What differs between points.
        steps: Inner steps to take.
    """
    version = find(spec.workload).version
    return SweepPoint(point=dict(point), spec=spec, workload_version=version, steps=steps)


def metric_mode(metric: str, stated: str) -> str:
    """Whether a metric falls or rises: as stated, else by its name.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, neither says so.
    """
    mode = stated or direction(metric)
    if mode not in {FALLS, RISES}:
        detail = f"the name of the metric {metric!r} does not say whether it falls or rises"
        raise _wrong(detail, "state it: min where it falls, max where it rises")
    return mode


def check_metric(specs: Iterable[JobSpec], metric: str) -> None:
    """Refuse a metric that a workload of the package itself does not measure.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, with those that it measures.
    """
    for name in {spec.workload for spec in specs}:
        entry = find(name)
        # Whoever brings a loss or a package may measure more than its entry says.
        if entry.dataset in _OWN_METRICS or metric in {LOSS, entry.metric}:
            continue
        detail = f"{name} has no metric {metric!r}"
        raise _wrong(detail, f"take {LOSS} or {entry.metric}")


_OWN_METRICS = frozenset({"program"})


def _wrong(detail: str, fix: str) -> HyperGPUError:
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
