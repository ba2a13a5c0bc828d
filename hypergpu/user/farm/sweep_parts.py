"""A sweep's points as the items of a farm job, and the job's data as its files."""

import functools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ParameterValue
from hypergpu.farm.sweep_points import (
    METRIC,
    SWEEP_DATA,
    SWEEP_KIND,
    SWEEP_WORKLOAD,
    SweepPoint,
    steps_of,
)
from hypergpu.user.farm.folder_parts import FolderNames, folder_files, folder_parts
from hypergpu.user.farm.input_chunks import write_text_chunks
from hypergpu.user.farm.items import SourceItem
from hypergpu.user.farm.request import MapSettings
from hypergpu.user.farm.starting import JobParts, MapOrder
from hypergpu.user.farm.sweep_grid import sweep_point
from hypergpu.user.farm.sweep_plan import SweepPlan
from hypergpu.user.farm.sweep_rungs import Rung


def rung_order(
    plan: SweepPlan, settings: MapSettings, positions: Sequence[int], rung: Rung, rungs: int
) -> MapOrder:
    """The farm job of a rung; its output has to be named.

    Args:
        plan: The sweep.
        settings: Those of farm jobs, as the user gave them.
        positions: Points of the rung, in order.
        rung: Says how many steps they take.
        rungs: How many there are.
    """
    parameters: dict[str, ParameterValue] = {
        METRIC: plan.metric,
        SWEEP_WORKLOAD: plan.specs[0].workload,
    }
    name = settings.name
    if rungs > 1:
        parameters |= {"rung": rung.number, "rungs": rungs}
        name = f"{name or SWEEP_KIND} (rung {rung.number} of {rungs})"
    points = [
        sweep_point(
            plan.specs[position],
            plan.points[position],
            rung.steps_of(steps_of(plan.specs[position])),
        )
        for position in positions
    ]
    settings = msgspec.structs.replace(settings, parameters=parameters, name=name, seed=plan.seed)
    return MapOrder(settings, points, Path(), read=functools.partial(_parts, plan))


def _parts(plan: SweepPlan, order: MapOrder, folder: Path) -> JobParts:
    points: Sequence[SweepPoint] = order.data
    chosen_points = points[: order.limit] if order.limit else points
    items = (SourceItem(number, point) for number, point in enumerate(chosen_points))
    return JobParts(
        write_text_chunks(items, folder),
        _data_files(plan.data_folder, folder),
        max(point.samples for point in chosen_points),
    )


def _data_files(source: Path | None, folder: Path) -> dict[str, Path]:
    if source is None:
        return {}
    title = f"the data folder {source}"
    try:
        files = folder_files(source, lambda _name: True)
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{title}: {error.strerror}") from error
    if not files:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{title} holds no file", fix="name another")
    parts = folder_parts(files, FolderNames(title, SWEEP_DATA, "join them to fewer files"))
    index = folder / SWEEP_DATA
    index.write_bytes(parts.index_content)
    return {SWEEP_DATA: index, **parts.large_files}
