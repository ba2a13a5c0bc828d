"""Items of a bundle as a performer reads them, and its result as the performer writes it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork, ShardProgress
from hypergpu.blobs import BlobRef
from hypergpu.clock import monotonic_ms
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundles import Bundle, BundleResult
from hypergpu.farm.item_chunks import read_json_lines
from hypergpu.packed_work import pack_work, unpack_work
from hypergpu.units import Bytes, Milliseconds

if TYPE_CHECKING:
    from gpu_node.shell.worker.trainer import ShardCallbacks


class ResultContent(NamedTuple):
    """The result of a bundle before it is written."""

    content: bytes
    """As `hypergpu.farm.bundle_results` has it."""
    failures: int
    """Items that have a reason in place of a value."""
    units: int
    """Work of the items with a value."""


def perform_bundle(
    request: DoWork,
    callbacks: "ShardCallbacks",
    work: Callable[[Bundle, "BundleReader"], ResultContent],
) -> WorkOutput:
    """Do a bundle: read it, have its items done, and write the result.

    Args:
        request: What the daemon asks.
        callbacks: The loop's.
        work: Does the items of a bundle.

    Raises:
        ShardError: The bundle cannot be read, or not be done here.
        ShardAbortedError: It is not needed any more.
    """
    from gpu_node.shell.worker.trainer import ShardError

    begun_ms = monotonic_ms()
    try:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        result = work(bundle, BundleReader(request, bundle, callbacks))
    except HyperGPUError as error:
        raise ShardError(str(error)) from error
    blob = BlobRef(digest_of(result.content), Bytes(len(result.content)))
    request.output_path(blob.digest).write_bytes(result.content)
    report = BundleResult(
        blob=blob,
        items=bundle.items - result.failures,
        failures=result.failures,
        units=result.units,
        compute_ms=Milliseconds(monotonic_ms() - begun_ms),
    )
    return WorkOutput(pack_work(request.work.kind, report), blob)


class BundleReader:
    """Reads the items of one bundle, and tells how far the work is."""

    def __init__(self, request: DoWork, bundle: Bundle, callbacks: "ShardCallbacks") -> None:
        self._request = request
        self._bundle = bundle
        self._callbacks = callbacks

    def lines(self) -> Iterator[bytes]:
        """The bundle's items as lines of JSON, not parsed: one may be malformed alone.

        Raises:
            HyperGPUError: MANIFEST_INVALID, a chunk is not what its manifest says.
        """
        begin, end = self._bundle.start, self._bundle.start + self._bundle.items
        for chunk in self._bundle.chunks:
            content = self._request.input_path(chunk.blob).read_bytes()
            lines: Sequence[bytes] = read_json_lines(content, chunk.items)
            yield from lines[max(0, begin - chunk.start) : end - chunk.start]

    def file(self, name: str) -> Path | None:
        """Path of a further file of the job, by its name; None: it has none of that name."""
        blob = self._bundle.files.get(name)
        return None if blob is None else self._request.input_path(blob)

    def note_done(self, items: int) -> None:
        """Note that so many items are done, to be called between parts of the work.

        Raises:
            ShardAbortedError: The rest is not needed any more.
        """
        self._callbacks.raise_if_aborted()
        progress = ShardProgress(self._request.lease, items, self._bundle.items, 0.0)
        self._callbacks.report(progress)
