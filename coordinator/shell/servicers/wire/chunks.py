"""Bulk messages built and taken apart by hand: one copy instead of three where models travel.

What is written here is exactly protobuf's encoding; what is unusual goes to protobuf.
"""

from typing import NamedTuple

from coordinator.shell.servicers.wire.handlers import Parser, parser
from hypergpu.v1 import job_pb2, node_pb2

CHUNK_BYTES = 512 << 10
_FIELD_1_VARINT = 0x08
_FIELD_1_BYTES = 0x0A
_FIELD_2_BYTES = 0x12


class UploadChunk(NamedTuple):
    """A chunk as it lies in the received message."""

    offset: int
    payload: memoryview


def encode_fetched(offset: int, payload: memoryview) -> bytes:
    """`FetchBlobResponse` with one chunk."""
    return _message(_FIELD_1_BYTES, offset, payload)


def encode_exported(offset: int, payload: memoryview) -> bytes:
    """`ExportModelResponse` with one chunk."""
    return _message(_FIELD_2_BYTES, offset, payload)


def _message(field: int, offset: int, payload: memoryview) -> bytes:
    head = b"".join(
        (
            bytes((_FIELD_1_VARINT,)) + _varint(offset) if offset else b"",
            bytes((_FIELD_2_BYTES,)),
            _varint(payload.nbytes),
        )
    )
    return b"".join((bytes((field,)), _varint(len(head) + payload.nbytes), head, payload))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(raw: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = raw[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise IndexError


def piece(raw: bytes) -> UploadChunk | None:
    """The chunk in field 2 of a stream message; None when it is not laid out in the usual way."""
    view = memoryview(raw)
    try:
        if view[0] != _FIELD_2_BYTES:
            return None
        size, at = _read_varint(view, 1)
        if at + size != len(view):
            return None
        offset = 0
        if view[at] == _FIELD_1_VARINT:
            offset, at = _read_varint(view, at + 1)
        if view[at] != _FIELD_2_BYTES:
            return None
        size, at = _read_varint(view, at + 1)
    except IndexError:
        return None
    return UploadChunk(offset, view[at:]) if at + size == len(view) else None


def upload_parser(
    message: type[node_pb2.SubmitUpdateRequest | job_pb2.UploadDataRequest],
) -> Parser:
    """Parse a stream of one header and then chunks: gives its message or an `UploadChunk`."""
    slow = parser(message)

    def parse(raw: bytes) -> object:
        quick = piece(raw)
        if quick is not None:
            return quick
        parsed = slow(raw)
        if parsed.HasField("chunk"):
            return UploadChunk(parsed.chunk.offset, memoryview(parsed.chunk.payload))
        return parsed.header

    return parse
