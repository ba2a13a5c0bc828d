"""A link as plain numbers, and how long bytes take over it. Pure: same numbers, same time."""

import msgspec

from hypergpu.units import Bytes, Milliseconds


class Link(msgspec.Struct, frozen=True):
    """One node's way to the coordinator and back."""

    one_way_ms: Milliseconds
    up_bytes_per_s: int
    down_bytes_per_s: int


def transfer_ms(link: Link, size_bytes: Bytes, bytes_per_s: int) -> Milliseconds:
    """From the first byte leaving to the last arriving: propagation plus serialisation."""
    return Milliseconds(link.one_way_ms + -(-size_bytes * 1000 // bytes_per_s))
