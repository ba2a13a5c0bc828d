"""Results of bundles as blobs: a value or a reason for each item, in the order of the items.

JSON lines hold an object each: ``{"value": ...}`` or ``{"error": "reason"}``. Safetensors hold one
tensor ``values`` of float32 [items, ...], and in the metadata ``errors``, a JSON object of reasons
by the item's place in the bundle; rows of such items are zeros. Both are canonical: equal values
give equal bytes, so that exact results are compared by digest.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ResultEncoding

ERROR_LENGTH_MOST = 500
VALUES = "values"
_ERRORS = "errors"
_HEADER_BYTES = 8
_HEADER_BYTES_MOST = 16 << 20


class ItemResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a result: a value, or the reason for which there is none."""

    value: Any = None
    error: str = ""


class VectorResults(NamedTuple):
    """Results that are arrays of numbers."""

    values: NDArray[np.float32]
    """float32 [items, ...]."""
    errors: Mapping[int, str]
    """Reasons by the item's place in the bundle."""


def json_results(results: Sequence[ItemResult]) -> bytes:
    """Results as JSON lines, with sorted keys."""
    return b"".join(
        msgspec.json.encode(each, order="sorted") + b"\n" for each in map(_line, results)
    )


def _line(result: ItemResult) -> dict[str, Any]:
    if result.error:
        return {"error": result.error[:ERROR_LENGTH_MOST]}
    return {"value": result.value}


def vector_results(results: VectorResults) -> bytes:
    """Arrays as safetensors. Rows of items with an error are set to zero."""
    values = np.array(results.values, dtype=np.float32, order="C")
    for place in results.errors:
        values[place] = 0.0
    errors = {str(place): text[:ERROR_LENGTH_MOST] for place, text in results.errors.items()}
    metadata = {_ERRORS: msgspec.json.encode(errors, order="sorted").decode()} if errors else None
    return bytes(save({VALUES: values}, metadata=metadata))


def read_json_results(content: bytes, items: int) -> list[ItemResult]:
    """Read results in JSON lines, trusting nothing in them.

    Raises:
        HyperGPUError: REQUEST_INVALID, they are malformed or of another number of items.
    """
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    if len(lines) != items:
        raise _result_error(f"{len(lines)} lines for {items} items")
    try:
        return [msgspec.json.decode(line, type=ItemResult) for line in lines]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _result_error(str(error)) from error


def read_vector_results(content: bytes, items: int) -> VectorResults:
    """Read results in safetensors, trusting nothing in them.

    Raises:
        HyperGPUError: REQUEST_INVALID, they are malformed or of another number of items.
    """
    errors = _header_errors(content)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, TypeError) as error:
        raise _result_error(str(error)) from error
    values = tensors.get(VALUES)
    if len(tensors) != 1 or values is None or values.dtype != np.float32 or values.ndim == 0:
        raise _result_error(f"they have no single tensor {VALUES!r} of float32")
    if len(values) != items or any(not 0 <= place < items for place in errors):
        raise _result_error(f"{len(values)} rows for {items} items")
    return VectorResults(values, errors)


def _header_errors(content: bytes) -> dict[int, str]:
    """Reasons in the metadata of safetensors, whose reader for numpy gives none."""
    size_bytes = int.from_bytes(content[:_HEADER_BYTES], "little")
    if len(content) < _HEADER_BYTES or size_bytes > min(len(content), _HEADER_BYTES_MOST):
        raise _result_error("the header is longer than the file")
    header_bytes = content[_HEADER_BYTES : _HEADER_BYTES + size_bytes]
    try:
        header = msgspec.json.decode(header_bytes, type=dict[str, Any])
        metadata = msgspec.convert(header.get("__metadata__", {}), dict[str, str])
        return msgspec.json.decode(metadata.get(_ERRORS, "{}"), type=dict[int, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _result_error(str(error)) from error


def failure_count(content: bytes, encoding: ResultEncoding, items: int) -> int:
    """How many items of a result have a reason in place of a value.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is malformed or of another number of items.
    """
    if encoding is ResultEncoding.SAFETENSORS:
        return len(read_vector_results(content, items).errors)
    return sum(bool(each.error) for each in read_json_results(content, items))


def _result_error(why: str) -> HyperGPUError:
    return HyperGPUError(Reason.REQUEST_INVALID, f"the result of a bundle is malformed: {why}")
