"""A bundle as a node gets it, and the node's report of its result: the packed structs.

A bundle is a run of items. Its items lie in chunks, and its result is one blob: see
`hypergpu.farm.item_chunks` and `hypergpu.farm.bundle_results`.
"""

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.farm.item_chunks import ItemEncoding
from hypergpu.farm.map_request import ParameterValue, ResultEncoding
from hypergpu.units import Bytes, Milliseconds
from hypergpu.work_units import WorkUnit

BUNDLE_CHUNKS_MOST = 16
"""Chunks that one bundle touches at most, so that it fits into a packed body and on a disk."""


class BundleChunk(msgspec.Struct, frozen=True):
    """A chunk that holds some of a bundle's items."""

    blob: BlobRef
    start: int
    """Position of the chunk's first item."""
    items: int


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """Items [start, start + items) of a farm job, and all that the result depends on."""

    start: int
    items: int
    encoding: ItemEncoding = ItemEncoding.JSONL
    chunks: tuple[BundleChunk, ...] = ()
    """In order; together they cover the bundle. None where the core has it: the shell adds them."""
    manifest: BlobRef | None = None
    """The manifest that the chunks are of, where the work is signed: the node checks them by it."""
    files: dict[str, BlobRef] = {}
    parameters: dict[str, ParameterValue] = {}
    seed: int = 0
    claims: BlobRef | None = None
    """Another node's results of these items, which are judged in place of being done: see
    `hypergpu.farm.written_texts`.
    """
    unit: WorkUnit = WorkUnit.ITEMS
    result: ResultEncoding = ResultEncoding.JSONL
    result_bytes_most: Bytes = Bytes(0)
    """Size of the result's blob at most."""
    limit_ms: Milliseconds = Milliseconds(0)
    """Time after which the lease ends; 0: none is stated."""

    @property
    def inputs(self) -> tuple[BlobRef, ...]:
        """All blobs that the work needs, each once."""
        others = (each for each in (self.manifest, self.claims) if each is not None)
        blobs = (*(chunk.blob for chunk in self.chunks), *self.files.values(), *others)
        return tuple({blob.digest: blob for blob in blobs}.values())


class BundleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of a bundle's result. The coordinator checks whatever it can."""

    blob: BlobRef
    """A result as `hypergpu.farm.bundle_results` has them; sent before this struct."""
    items: int
    """Items with a value."""
    failures: int = 0
    """Items that could not be done, each with its reason in the blob. With ``items`` they are the
    bundle's.
    """
    units: int
    """Work of the items with a value, by `hypergpu.work_units.whole_units`."""
    compute_ms: Milliseconds = Milliseconds(0)
    """For people and forecasts; neither acceptance nor pay rests on it."""
