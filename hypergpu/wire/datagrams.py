"""The datagrams that measure losses of a line."""

import struct
from typing import NamedTuple

DATAGRAM_BYTES = 200
"""Size of each datagram; any other size is dropped."""
TOKEN_BYTES = 45
PACKETS_MAX = 1_000
"""Most packets of one train in a report."""
_NUMBERS = struct.Struct(">IH")


class Numbers(NamedTuple):
    """Numbers of a train and of a packet in it."""

    train: int
    packet: int


def datagram(token: bytes, numbers: Numbers) -> bytes:
    """Return a packet of a train."""
    head = token + _NUMBERS.pack(numbers.train & 0xFFFFFFFF, numbers.packet)
    return head.ljust(DATAGRAM_BYTES, b"\0")


def numbers_of(echo: bytes, token: bytes) -> Numbers | None:
    """Return the numbers of an echoed packet; None when it has another token."""
    if len(echo) != DATAGRAM_BYTES or not echo.startswith(token):
        return None
    return Numbers(*_NUMBERS.unpack_from(echo, len(token)))
