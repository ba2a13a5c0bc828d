"""The input of a farm job as blobs: a manifest that names chunks, and chunks of items in order.

Items have positions from 0 in the order of the input. A chunk holds a run of them and a few MiB;
the manifest is msgpack. Whoever reads either checks its size before anything of it is parsed.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Bytes

MANIFEST_BYTES_MOST = 4 << 20
CHUNK_BYTES_MOST = 8 << 20
"""Largest chunk; writers aim at half of it."""
CHUNKS_MOST = 16_384
"""Chunks of one input: 64 GiB of items at 4 MiB each."""
CHUNK_ITEMS_MOST = 1 << 20
_DIGEST_LENGTH = 64


class ItemEncoding(Enum):
    """How a chunk holds its items."""

    JSONL = "jsonl"
    """UTF-8, one JSON value a line; the line ends with a newline and has none within."""
    ARROW = "arrow"
    """One Arrow IPC file, whose rows are the items: for arrays and bytes."""


class ItemChunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of an input."""

    digest: Digest
    size_bytes: Bytes
    items: int

    @property
    def blob(self) -> BlobRef:
        """The chunk by name."""
        return BlobRef(self.digest, self.size_bytes)


class ItemManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All chunks of an input, in the order of its items."""

    encoding: ItemEncoding
    chunks: tuple[ItemChunk, ...]

    @property
    def items(self) -> int:
        """Number of items of the whole input."""
        return sum(chunk.items for chunk in self.chunks)


def manifest_bytes(manifest: ItemManifest) -> bytes:
    """A manifest as the blob that a request names.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is none that `read_manifest` would take.
    """
    content = msgspec.msgpack.encode(manifest)
    read_manifest(content)
    return content


def read_manifest(content: bytes) -> ItemManifest:
    """Read a manifest, trusting nothing in it.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is too large, malformed, empty, or a chunk is not what
            a chunk may be.
    """
    if len(content) > MANIFEST_BYTES_MOST:
        detail = f"the manifest has {len(content)} bytes, and {MANIFEST_BYTES_MOST} at most"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail, fix="use larger chunks, or more jobs")
    try:
        manifest = msgspec.msgpack.decode(content, type=ItemManifest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"the manifest of items is malformed: {error}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail) from error
    if not 0 < len(manifest.chunks) <= CHUNKS_MOST:
        detail = f"the manifest names {len(manifest.chunks)} chunks: 1 to {CHUNKS_MOST} are allowed"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    for number, chunk in enumerate(manifest.chunks):
        _check_chunk(number, chunk)
    return manifest


def _check_chunk(number: int, chunk: ItemChunk) -> None:
    is_digest = len(chunk.digest) == _DIGEST_LENGTH and set(chunk.digest) <= set("0123456789abcdef")
    if not is_digest:
        raise HyperGPUError(Reason.MANIFEST_INVALID, f"chunk {number} has no digest for a name")
    if not 0 < chunk.size_bytes <= CHUNK_BYTES_MOST:
        detail = f"chunk {number} has {chunk.size_bytes} bytes: 1 to {CHUNK_BYTES_MOST} are allowed"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail, fix="divide it")
    if not 0 < chunk.items <= CHUNK_ITEMS_MOST:
        detail = f"chunk {number} has {chunk.items} items: 1 to {CHUNK_ITEMS_MOST} are allowed"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)


def json_lines(items: Iterable[Any]) -> bytes:
    """Items as the content of a chunk in JSON lines."""
    return b"".join(msgspec.json.encode(item) + b"\n" for item in items)


def read_json_lines(content: bytes, items: int) -> Sequence[bytes]:
    """The lines of a chunk, one an item and not parsed: one may be malformed alone.

    Args:
        content: The chunk, whose digest was checked.
        items: How many items its manifest says that it has.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is too large or has another number of items.
    """
    if len(content) > CHUNK_BYTES_MOST:
        detail = f"a chunk has {len(content)} bytes, and {CHUNK_BYTES_MOST} at most"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if len(lines) != items:
        detail = f"a chunk has {len(lines)} lines, and {items} items by its manifest"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    return lines
