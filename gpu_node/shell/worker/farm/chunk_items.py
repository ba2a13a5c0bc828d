"""The items of a bundle as its chunks hold them."""

from typing import Any, NamedTuple

import msgspec

from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundles import Bundle, BundleChunk
from hypergpu.farm.item_chunks import ItemEncoding, read_json_lines


class TextItem(NamedTuple):
    """An item of JSON lines."""

    position: int
    value: Any
    error: str = ""
    """Why it cannot be done; then it has no value."""


def json_items(request: DoWork, bundle: Bundle) -> list[TextItem]:
    """The items of a bundle, in order. A malformed one is told by itself.

    Raises:
        ShardError: A chunk is not what the bundle says.
    """
    end = bundle.start + bundle.items
    items = [
        item
        for chunk in bundle.chunks
        for item in chunk_items(request, bundle, chunk, range(bundle.start, end))
    ]
    if len(items) != bundle.items:
        raise ShardError(f"the chunks hold {len(items)} items of the bundle's {bundle.items}")
    return items


def chunk_items(
    request: DoWork, bundle: Bundle, chunk: BundleChunk, positions: range
) -> list[TextItem]:
    """Items of a chunk, also those of other bundles; no other line is parsed.

    Args:
        request: The bundle's.
        bundle: Says how items are held.
        chunk: One of the bundle's.
        positions: Those that are wanted, of whatever chunk.

    Raises:
        ShardError: It is not what the bundle says.
    """
    if bundle.encoding is not ItemEncoding.JSONL:
        raise ShardError(f"items of this kind are JSON lines, not {bundle.encoding.value}")
    try:
        lines = read_json_lines(request.input_path(chunk.blob).read_bytes(), chunk.items)
    except OSError as error:
        raise ShardError(f"a chunk cannot be read: {error.strerror}") from error
    except HyperGPUError as error:
        raise ShardError(error.message) from error
    first = max(0, positions.start - chunk.start)
    wanted_lines = lines[first : max(0, positions.stop - chunk.start)]
    return [_item(chunk.start + first + place, line) for place, line in enumerate(wanted_lines)]


def _item(position: int, line: bytes) -> TextItem:
    try:
        return TextItem(position, msgspec.json.decode(line))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return TextItem(position, None, f"the item is no JSON: {error}")


def as_text(item: TextItem) -> TextItem:
    """The item where it is a text; else with the reason why it cannot be done."""
    if item.error or isinstance(item.value, str):
        return item
    return item._replace(value=None, error=f"the item is {_form(item.value)} and not a text")


def _form(value: Any) -> str:
    names = {type(None): "empty", bool: "true or false", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")
