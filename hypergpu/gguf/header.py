"""The header of a GGUF file, checked before any other program opens the file.

Every count, length and offset is held against the size of the file before anything is read or
allocated by it, so that a malformed file costs little and is refused with the place and the fault.
What passes is a header whose tensors lie one behind another inside the file, as the format has it
(version 2 or 3, little-endian). What the numbers mean is for the engine to judge.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.gguf.tensor_types import (
    ARRAY_TYPE,
    NUMBER_FORMATS,
    STRING_TYPE,
    TENSOR_TYPES,
    TensorType,
)
from hypergpu.units import Bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_USUAL = 32
_ALIGNMENT_KEY = "general.alignment"
_ALIGNMENT_MOST = 1 << 16
_KEYS_MOST = 1 << 16
_TENSORS_MOST = 1 << 16
_KEY_BYTES_MOST = 1 << 16
_NAME_BYTES_MOST = 63
"""Longer names are cut off by ggml."""
_DIMENSIONS_MOST = 4
_HEADER_BYTES_MOST = 1 << 28
_NUMBERS_KEPT = 4_096
"""Numbers of an array that are read; longer arrays are only measured."""
_SIZE_MOST = 2**63 - 1
_ENTRY_BYTES_LEAST = 12
"""A key of no length, its length and the type of its value."""
_TENSOR_BYTES_LEAST = 32

GgufNumber = int | float | bool


class GgufArray(NamedTuple):
    """A list among the metadata."""

    kind: int
    length: int
    numbers: tuple[GgufNumber, ...] = ()
    """Its numbers where they are few; never texts."""


GgufValue = GgufNumber | str | GgufArray


class GgufTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Numbers of each dimension, the one whose numbers lie side by side first."""
    type: TensorType
    offset_bytes: Bytes
    """From the begin of the tensors."""
    size_bytes: Bytes


class GgufHeader(NamedTuple):
    """What a GGUF file says of itself."""

    version: int
    metadata: Mapping[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    data_offset_bytes: Bytes
    """Where the tensors begin."""

    def text(self, key: str) -> str | None:
        """The text of a key; None: there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """The whole number of a key; None: there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def is_true(self, key: str, *, default: bool) -> bool:
        """The truth of a key."""
        value = self.metadata.get(key)
        return value if isinstance(value, bool) else default

    @property
    def architecture(self) -> str:
        """Kind of the model; empty: none is stated."""
        return self.text("general.architecture") or ""

    @property
    def weights_bytes(self) -> Bytes:
        """Size of all tensors."""
        return Bytes(sum(tensor.size_bytes for tensor in self.tensors))


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a file. No tensor is read.

    Raises:
        HyperGPUError: FILE_UNUSABLE, with the place and the fault.
    """
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            if size_bytes < len(MAGIC):
                raise _fault("it is too short", 0)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return parse_gguf_header(content, size_bytes)
    except OSError as error:
        detail = f"{path.name}: {error.strerror}"
        raise HyperGPUError(
            Reason.FILE_UNUSABLE, detail, fix="give a file that is there"
        ) from error


def parse_gguf_header(content: "bytes | mmap.mmap", size_bytes: int) -> GgufHeader:
    """Check the header at the begin of a file's content.

    Raises:
        HyperGPUError: FILE_UNUSABLE, with the place and the fault.
    """
    cursor = _Cursor(content, size_bytes)
    if cursor.take(len(MAGIC)) != MAGIC:
        raise _fault("it does not begin with 'GGUF'", 0)
    version = cursor.number("I")
    if version not in VERSIONS:
        big_endian = " (it may be big-endian)" if version & 0xFFFF == 0 else ""
        raise _fault(f"its version {version}{big_endian} is none of 2 and 3", cursor.place)
    tensor_count = cursor.count("Q", _TENSORS_MOST, _TENSOR_BYTES_LEAST, "tensors")
    key_count = cursor.count("Q", _KEYS_MOST, _ENTRY_BYTES_LEAST, "keys")
    metadata = _metadata(cursor, key_count)
    alignment = _alignment(metadata, cursor)
    tensors = [_tensor(cursor) for _ in range(tensor_count)]
    data_offset = -(-cursor.place // alignment) * alignment
    _check_places(tensors, alignment, data_offset, size_bytes)
    return GgufHeader(version, metadata, tuple(tensors), Bytes(data_offset))


class _Cursor:
    """A place in a file that is read forward."""

    def __init__(self, content: "bytes | mmap.mmap", size_bytes: int) -> None:
        self._content = content
        self._end = min(size_bytes, _HEADER_BYTES_MOST)
        self.place = 0

    @property
    def rest_bytes(self) -> int:
        """Bytes that a header may still have."""
        return self._end - self.place

    def skip(self, size_bytes: int) -> None:
        """Go on by so many bytes."""
        if size_bytes > self.rest_bytes:
            raise _fault(f"{size_bytes} more bytes are announced than the file has", self.place)
        self.place += size_bytes

    def take(self, size_bytes: int) -> bytes:
        """The next bytes."""
        begin = self.place
        self.skip(size_bytes)
        return self._content[begin : self.place]

    def number(self, form: str) -> int:
        """The next number, as `struct` has it."""
        form = f"<{form}"
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, form: str, most: int, bytes_least: int, title: str) -> int:
        """The next count of parts, of which each takes some bytes at least."""
        place, count = self.place, self.number(form)
        if count > min(most, self.rest_bytes // bytes_least):
            raise _fault(f"{count} {title} do not fit into it", place)
        return count

    def text(self, bytes_most: int, title: str) -> str:
        """The next text."""
        place, size_bytes = self.place, self.number("Q")
        if size_bytes > min(bytes_most, self.rest_bytes):
            raise _fault(f"a {title} of {size_bytes} bytes is too long", place)
        try:
            return self.take(size_bytes).decode()
        except UnicodeDecodeError:
            raise _fault(f"a {title} is no UTF-8", place) from None


def _metadata(cursor: _Cursor, count: int) -> dict[str, GgufValue]:
    metadata: dict[str, GgufValue] = {}
    for _ in range(count):
        place = cursor.place
        key = cursor.text(_KEY_BYTES_MOST, "key")
        if not key or key in metadata:
            raise _fault(f"the key {key[:80]!r} is empty or comes twice", place)
        metadata[key] = _value(cursor, cursor.number("I"))
    return metadata


def _value(cursor: _Cursor, kind: int) -> GgufValue:
    if kind == STRING_TYPE:
        return cursor.text(_HEADER_BYTES_MOST, "text")
    if kind == ARRAY_TYPE:
        return _array(cursor)
    if kind not in NUMBER_FORMATS:
        raise _fault(f"a value is of the unknown type {kind}", cursor.place)
    return _numbers(cursor, kind, 1)[0]


def _array(cursor: _Cursor) -> GgufArray:
    kind = cursor.number("I")
    if kind == STRING_TYPE:
        count = cursor.count("Q", _SIZE_MOST, 8, "texts")
        for _ in range(count):
            # A text of a vocabulary may hold any bytes.
            cursor.skip(cursor.number("Q"))
        return GgufArray(kind, count)
    if kind not in NUMBER_FORMATS:
        raise _fault(f"a list holds values of the type {kind}", cursor.place)
    item_bytes = struct.calcsize(f"<{NUMBER_FORMATS[kind]}")
    count = cursor.count("Q", _SIZE_MOST, item_bytes, "numbers")
    if count <= _NUMBERS_KEPT:
        return GgufArray(kind, count, _numbers(cursor, kind, count))
    cursor.skip(count * item_bytes)
    return GgufArray(kind, count)


def _numbers(cursor: _Cursor, kind: int, count: int) -> tuple[GgufNumber, ...]:
    form = f"<{count}{NUMBER_FORMATS[kind]}"
    return struct.unpack(form, cursor.take(struct.calcsize(form)))


def _alignment(metadata: Mapping[str, GgufValue], cursor: _Cursor) -> int:
    value = metadata.get(_ALIGNMENT_KEY, ALIGNMENT_USUAL)
    is_power = isinstance(value, int) and 0 < value <= _ALIGNMENT_MOST and not value & (value - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not is_power or value % 8:
        raise _fault(f"its alignment {value!r} is no power of two from 8 on", cursor.place)
    return value


def _tensor(cursor: _Cursor) -> GgufTensor:
    place = cursor.place
    name = cursor.text(_NAME_BYTES_MOST, "tensor's name")
    dimensions = cursor.number("I")
    if not 0 < dimensions <= _DIMENSIONS_MOST:
        raise _fault(f"the tensor {name!r} has {dimensions} dimensions", place)
    shape = tuple(cursor.number("Q") for _ in range(dimensions))
    kind = TENSOR_TYPES.get(number := cursor.number("I"))
    if kind is None:
        raise _fault(f"the tensor {name!r} is of the unknown type {number}", place)
    numbers = math.prod(shape)
    if not 0 < numbers <= _SIZE_MOST or shape[0] % kind.block_numbers:
        raise _fault(f"the tensor {name!r} of {kind.name} has the shape {shape}", place)
    size_bytes = numbers // kind.block_numbers * kind.block_bytes
    return GgufTensor(name, shape, kind, Bytes(cursor.number("Q")), Bytes(size_bytes))


def _check_places(
    tensors: list[GgufTensor], alignment: int, data_offset: int, size_bytes: int
) -> None:
    """Require that tensors lie one behind another, each at a multiple of the alignment."""
    names: set[str] = set()
    end = 0
    for tensor in tensors:
        if tensor.name in names:
            raise _fault(f"the tensor {tensor.name!r} comes twice", data_offset)
        names.add(tensor.name)
        if tensor.offset_bytes != end:
            detail = f"the tensor {tensor.name!r} lies at {tensor.offset_bytes} and not at {end}"
            raise _fault(detail, data_offset)
        if data_offset + end + tensor.size_bytes > size_bytes:
            detail = f"the tensor {tensor.name!r} of {tensor.size_bytes} bytes ends behind the file"
            raise _fault(detail, data_offset + end)
        end = -(-(end + tensor.size_bytes) // alignment) * alignment


def _fault(detail: str, place: int) -> HyperGPUError:
    return HyperGPUError(
        Reason.FILE_UNUSABLE,
        f"the file is no GGUF that may be opened: {detail} (at byte {place})",
        fix="get the file anew, and compare its size and digest with those of its source",
    )
