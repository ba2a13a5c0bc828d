"""Cuts items into chunks, the blobs that a farm job is given."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.array_items import array_items
from hypergpu.farm.item_chunks import ItemChunk, ItemEncoding, ItemManifest
from hypergpu.units import Bytes
from hypergpu.user.farm.items import SourceItem

CHUNK_BYTES = 4 << 20
CHUNK_ITEMS = 65_536
MANIFEST = "manifest"


class ChunkedItems(NamedTuple):
    """Items as chunks in a folder."""

    manifest: ItemManifest
    paths: tuple[Path, ...]
    """A file for each chunk."""
    ids: list[str | int]
    """In order; empty: they are the positions."""
    reasons: dict[int, str]
    """Why rows could not become items, by position."""
    largest_bytes: int
    """Size of the largest item."""


def write_text_chunks(items: Iterable[SourceItem], folder: Path) -> ChunkedItems:
    """Write items as chunks of JSON lines.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is no item; or what reading them raises.
    """
    ids: list[str | int] = []
    reasons: dict[int, str] = {}
    chunks: list[ItemChunk] = []
    paths: list[Path] = []
    largest_bytes = 1
    for content, count, size_bytes in _text_contents(items, ids, reasons):
        paths.append(_write(folder, len(chunks), content))
        chunks.append(ItemChunk(digest_of(content), Bytes(len(content)), count))
        largest_bytes = max(largest_bytes, size_bytes)
    _check_count(len(ids))
    is_plain = all(each == position for position, each in enumerate(ids))
    manifest = ItemManifest(encoding=ItemEncoding.JSONL, chunks=tuple(chunks))
    return ChunkedItems(manifest, tuple(paths), [] if is_plain else ids, reasons, largest_bytes)


def _text_contents(
    items: Iterable[SourceItem], ids: list[str | int], reasons: dict[int, str]
) -> Iterator[tuple[bytes, int, int]]:
    """Contents of chunks, their number of items and the size of the largest."""
    encoder = msgspec.json.Encoder()
    lines: list[bytes] = []
    size_bytes = 0
    for item in items:
        line, error = _encoded_line(encoder, item)
        if error:
            reasons[len(ids)] = error
        ids.append(item.id)
        if lines and (size_bytes + len(line) > CHUNK_BYTES or len(lines) >= CHUNK_ITEMS):
            yield b"".join(lines), len(lines), max(map(len, lines))
            lines, size_bytes = [], 0
        lines.append(line)
        size_bytes += len(line)
    if lines:
        yield b"".join(lines), len(lines), max(map(len, lines))


def _encoded_line(encoder: msgspec.json.Encoder, item: SourceItem) -> tuple[bytes, str]:
    if item.error:
        return b"null\n", item.error
    try:
        line = encoder.encode(item.value) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        return b"null\n", f"the item is no JSON: {error}"
    if len(line) > CHUNK_BYTES:
        return b"null\n", f"the item has {len(line)} bytes, and {CHUNK_BYTES} at most"
    return line, ""


def write_array_chunks(batches: Iterable[Mapping[str, NDArray[Any]]], folder: Path) -> ChunkedItems:
    """Write items that are arrays as chunks of Arrow files.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is no item, or one is too large; or what reading them
            raises.
    """
    chunks: list[ItemChunk] = []
    paths: list[Path] = []
    largest_bytes = 1
    for batch in batches:
        count = len(next(iter(batch.values())))
        item_bytes = max(1, sum(array[:1].nbytes for array in batch.values()))
        if item_bytes > CHUNK_BYTES:
            detail = f"an item has {item_bytes} bytes, and {CHUNK_BYTES} at most"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="give smaller items")
        largest_bytes = max(largest_bytes, item_bytes)
        step = max(1, min(CHUNK_BYTES // item_bytes, CHUNK_ITEMS))
        for first in range(0, count, step):
            part = {name: np.asarray(array[first : first + step]) for name, array in batch.items()}
            content = array_items(part)
            paths.append(_write(folder, len(chunks), content))
            items = len(next(iter(part.values())))
            chunks.append(ItemChunk(digest_of(content), Bytes(len(content)), items))
    _check_count(sum(chunk.items for chunk in chunks))
    manifest = ItemManifest(encoding=ItemEncoding.ARROW, chunks=tuple(chunks))
    return ChunkedItems(manifest, tuple(paths), [], {}, largest_bytes)


def _check_count(items: int) -> None:
    if not items:
        detail = "the data hold no item, so that there is nothing to do"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="give at least one")


def _write(folder: Path, number: int, content: bytes) -> Path:
    path = folder / f"chunk-{number:06}"
    path.write_bytes(content)
    return path
