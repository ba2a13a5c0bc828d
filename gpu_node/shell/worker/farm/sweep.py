"""Kind ``map/sweep``: each item is a point, a whole small training on this device.

Its result follows from the point alone: from the settings, the data and the seed that they name.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, json_items
from gpu_node.shell.worker.farm.folder_files import index_content, lay_out_folder
from gpu_node.shell.worker.farm.point_training import PointError, PointWorkload, installed_entry
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.folder_index import read_folder_index
from hypergpu.farm.sweep_points import (
    METRIC,
    SWEEP_DATA,
    SWEEP_WORKLOAD,
    SweepPoint,
    read_point,
)
from hypergpu.jobfile.rules import checked_spec
from hypergpu.packed_work import unpack_work


class PointTrainers:
    """The newest workload, for the next points that need the same."""

    def __init__(self) -> None:
        self._key = b""
        self._workload: PointWorkload | None = None

    def of(self, request: DoWork, bundle: Bundle, point: SweepPoint) -> PointWorkload:
        """The workload of a point.

        Raises:
            PointError: No node has it.
            ShardError: It cannot be used here.
        """
        spec = point.spec
        key = msgspec.json.encode([spec.workload, spec.options, bundle.files], order="sorted")
        if self._workload is None or self._key != key:
            self._workload = None  # frees the last data before the next take memory
            folder = _data_folder(request, bundle) if spec.data.path else None
            self._workload = PointWorkload(point, folder)
            self._key = key
        return self._workload


def _data_folder(request: DoWork, bundle: Bundle) -> Path:
    """The user's data as a folder of its own."""
    content = index_content(request, bundle, SWEEP_DATA, "data")
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        lay_out_folder(request, bundle, read_folder_index(content), folder)
    except HyperGPUError as error:
        shutil.rmtree(folder)
        raise ShardError(error.message) from error
    except ShardError:
        shutil.rmtree(folder)
        raise
    return folder


def sweep_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What trains the points of bundles; it keeps data from one to the next."""
    trainers = PointTrainers()

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        metric = str(bundle.parameters.get(METRIC, "loss"))
        course = BundleCourse(request, callbacks, bundle.items)
        results: list[ItemResult] = []
        samples = 0
        for item in json_items(request, bundle):
            course.advance(0)
            try:
                point = _point_of(item, bundle)
                workload = trainers.of(request, bundle, point)
                trained_point = workload.train(point, metric, lambda: course.advance(0))
            except PointError as error:
                results.append(ItemResult(error=str(error)))
            else:
                samples += point.samples
                *_, (steps, value) = trained_point.curve
                curve = [{"step": step, "value": each} for step, each in trained_point.curve]
                results.append(
                    ItemResult(
                        {
                            "point": point.point,
                            METRIC: value,
                            "metrics": dict(trained_point.metrics),
                            "steps": steps,
                            "curve": curve,
                        }
                    )
                )
            course.advance(1)
        return json_output(request, course, results, samples)

    return perform


def _point_of(item: TextItem, bundle: Bundle) -> SweepPoint:
    """The point of an item. Its user has checked it: what is wrong with it is this node's version.

    Raises:
        PointError: The user's row is no point.
        ShardError: It cannot be trained here.
    """
    if item.error or item.value is None:
        raise PointError(item.error or "the row is no point")
    try:
        point = read_point(item.value)
        if point.spec.workload != bundle.parameters.get(SWEEP_WORKLOAD):
            raise ShardError("the point trains another workload than the sweep states")
        installed_entry(point)
        checked_spec(point.spec)
    except HyperGPUError as error:
        raise ShardError(error.message) from error
    return point


perform = sweep_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its data are kept as long as the process."""
