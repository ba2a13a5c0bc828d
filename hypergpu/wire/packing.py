"""Messages and addresses of one control stream, written as what differs from those before them.

Assignments of a job are much alike, as are addresses that one store signs. Both ends keep the text
that the other has; nothing is packed before it was said once.
"""

import re
import zlib

from google.protobuf.message import DecodeError

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import node_pb2, tensor_pb2

PACKED_BYTES_MIN = 64
"""Shorter messages are sent as they are."""
_HISTORY_BYTES = 4 << 10
"""Kept of what a stream's messages said: a few assignments with their receipts."""
_MESSAGE_BYTES_MAX = 4 << 20
_ADDRESS_BYTES_MAX = 16 << 10
_WINDOW_BITS = 13
_MEMORY_LEVEL = 5
_DIGITS = re.compile(rb"(?:[0-9a-f]{2}){16,255}")
_OCTETS = b"\x00"
"""Begins what stands for hexadecimal digits: their number, halved, and the octets. No URL has it.
"""


class MessagePacker:
    """Packs what one end of a control stream sends, in its order."""

    def __init__(self) -> None:
        self._history = b""

    def pack(self, message: node_pb2.ControlResponse) -> node_pb2.ControlResponse:
        """The message as it goes out."""
        raw = message.SerializeToString()
        # A peer that is to be refused must be able to read why.
        if len(raw) < PACKED_BYTES_MIN or message.HasField("welcome"):
            return message
        packed_bytes = _deflate(raw, self._history)
        self._history = _with_newest(self._history, raw)
        return node_pb2.ControlResponse(packed=packed_bytes)


class MessageUnpacker:
    """Unpacks what a `MessagePacker` at the other end packed, in the same order."""

    def __init__(self) -> None:
        self._history = b""

    def unpack(self, message: node_pb2.ControlResponse) -> node_pb2.ControlResponse:
        """The message that was to be sent.

        Raises:
            HyperGPUError: CALL_BROKEN, no such packer wrote it.
        """
        if not message.HasField("packed"):
            return message
        raw = _inflate(message.packed, self._history, _MESSAGE_BYTES_MAX)
        self._history = _with_newest(self._history, raw)
        try:
            return node_pb2.ControlResponse.FromString(raw)
        except DecodeError:
            raise _unpackable_error("a message") from None


def pack_addresses(ticket: tensor_pb2.Ticket, known: str) -> tensor_pb2.Ticket:
    """A ticket whose addresses are told by what differs from one that its bearer knows.

    Args:
        ticket: The ticket, which does not change.
        known: Address like those of the ticket; empty: the bearer knows none.
    """
    packed_ticket = tensor_pb2.Ticket()
    packed_ticket.CopyFrom(ticket)
    for each in packed_ticket.ranges if known else ():
        each.packed_url = _pack_address(each.url, known)
        each.url = ""
    return packed_ticket


def unpack_addresses(ticket: tensor_pb2.Ticket, known: str) -> tensor_pb2.Ticket:
    """The ticket as it was before `pack_addresses` with the same address.

    Raises:
        HyperGPUError: CALL_BROKEN, its addresses were not packed so.
    """
    for each in ticket.ranges:
        if each.packed_url:
            each.url = _unpack_address(each.packed_url, known)
            each.packed_url = b""
    return ticket


def _pack_address(url: str, known: str) -> bytes:
    like = known.encode()

    def octets(found: re.Match[bytes]) -> bytes:
        digits = found.group()
        if digits in like:
            return digits
        return _OCTETS + bytes([len(digits) // 2]) + bytes.fromhex(digits.decode())

    return _deflate(_DIGITS.sub(octets, url.encode()), like)


def _unpack_address(packed: bytes, known: str) -> str:
    pieces = _split(_inflate(packed, known.encode(), _ADDRESS_BYTES_MAX))
    try:
        return b"".join(pieces).decode()
    except UnicodeDecodeError:
        raise _unpackable_error("an address") from None


def _split(text: bytes) -> list[bytes]:
    """Pieces of an address in order, octets as digits again."""
    pieces: list[bytes] = []
    while True:
        before, mark, rest = text.partition(_OCTETS)
        pieces.append(before)
        if not mark:
            return pieces
        end = 1 + rest[0] if rest else 1
        if len(rest) < end:
            raise _unpackable_error("an address")
        pieces.append(rest[1:end].hex().encode())
        text = rest[end:]


def _with_newest(history: bytes, raw: bytes) -> bytes:
    return (history + raw)[-_HISTORY_BYTES:]


def _deflate(raw: bytes, history: bytes) -> bytes:
    packer = zlib.compressobj(level=9, wbits=-_WINDOW_BITS, memLevel=_MEMORY_LEVEL, zdict=history)
    return packer.compress(raw) + packer.flush()


def _inflate(packed: bytes, history: bytes, bytes_max: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=-_WINDOW_BITS, zdict=history)
    try:
        raw = unpacker.decompress(packed, bytes_max)
    except zlib.error:
        raise _unpackable_error("a message") from None
    if not unpacker.eof or unpacker.unused_data:
        raise _unpackable_error("a message")
    return raw


def _unpackable_error(what: str) -> HyperGPUError:
    return HyperGPUError(Reason.CALL_BROKEN, f"{what} came that cannot be unpacked")
