"""The end and the course of a bundle's work: its result's blob, and its progress."""

import time
from collections.abc import Sequence
from fractions import Fraction

from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork, ShardProgress
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.farm.bundle_results import ItemResult, VectorResults, json_results, vector_results
from hypergpu.farm.bundles import BundleResult
from hypergpu.packed_work import WorkAmount, pack_work
from hypergpu.units import Bytes, Milliseconds
from hypergpu.work_units import whole_units

_REPORT_EVERY_S = 0.25


class BundleCourse:
    """Reports how far the work on a bundle is, and ends it when nobody wants it any more."""

    def __init__(self, request: DoWork, callbacks: ShardCallbacks, items: int) -> None:
        self._request = request
        self._callbacks = callbacks
        self._items = items
        self._items_done = 0
        self._start_s = time.monotonic()
        self._due_s = self._start_s

    @property
    def compute_ms(self) -> Milliseconds:
        """Time since the work began."""
        return Milliseconds(round(1000 * (time.monotonic() - self._start_s)))

    def advance(self, items: int) -> None:
        """Count items that are done. Call it between batches, with 0 before the first.

        Raises:
            ShardAbortedError: The bundle is not wanted any more.
        """
        self._callbacks.raise_if_aborted()
        self._items_done = min(self._items, self._items_done + items)
        now_s = time.monotonic()
        if now_s >= self._due_s:
            progress = ShardProgress(self._request.lease, self._items_done, self._items, loss=0.0)
            self._callbacks.report(progress)
            self._due_s = now_s + _REPORT_EVERY_S


def json_output(
    request: DoWork, course: BundleCourse, results: Sequence[ItemResult], units: Fraction | int
) -> WorkOutput:
    """The output of a bundle whose results are JSON.

    Args:
        request: The bundle's.
        course: Tells the time that it took.
        results: One an item, in order.
        units: Exact work of the items with a value.
    """
    failures = sum(bool(result.error) for result in results)
    return _output(request, course, json_results(results), (len(results), failures), units)


def vector_output(
    request: DoWork, course: BundleCourse, results: VectorResults, units: Fraction | int
) -> WorkOutput:
    """The output of a bundle whose results are arrays. See `json_output`."""
    counts = (len(results.values), len(results.errors))
    return _output(request, course, vector_results(results), counts, units)


def _output(
    request: DoWork,
    course: BundleCourse,
    content: bytes,
    counts: tuple[int, int],
    units: Fraction | int,
) -> WorkOutput:
    items, failures = counts
    blob = BlobRef(digest_of(content), Bytes(len(content)))
    request.output_path(blob.digest).write_bytes(content)
    result = BundleResult(
        blob=blob,
        items=items - failures,
        failures=failures,
        units=whole_units(units) if failures < items else 0,
        compute_ms=course.compute_ms,
    )
    amount = WorkAmount(result.units, result.compute_ms)
    return WorkOutput(pack_work(request.work.kind, result, amount), blob)
