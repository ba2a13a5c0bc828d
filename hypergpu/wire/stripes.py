"""Stripes of an update; each travels over a connection of its own."""

import msgspec

from hypergpu.errors import HyperGPUError, Reason

STRIPES_MAX = 16
STRIPE_BYTES_MIN = 10 << 10
"""A fresh TCP window carries as much at once (RFC 6928), headers and TLS included: of less, more
connections save no round trip.
"""
PIECE_BYTES = 64 << 10
"""Bytes in a chunk of a stripe or range; over a slow link a larger one would arrive late."""


class Stripe(msgspec.Struct, frozen=True):
    """The ``index``-th of ``count`` stripes."""

    index: int
    count: int

    def start(self, size_bytes: int) -> int:
        """Return its first byte in an update of ``size_bytes``."""
        return self.index * size_bytes // self.count

    def end(self, size_bytes: int) -> int:
        """Return the byte after its last one."""
        return (self.index + 1) * size_bytes // self.count


WHOLE = Stripe(0, 1)


def stripe_from_wire(index: int, count: int, size_bytes: int) -> Stripe:
    """Check the stripe that a peer names of an update of ``size_bytes``.

    Raises:
        HyperGPUError: REQUEST_INVALID, there is no such stripe, or they are too many or too small.
    """
    count = count or 1
    if index >= count:
        raise HyperGPUError(Reason.REQUEST_INVALID, f"there is no stripe {index} of {count}")
    if count > most_stripes(size_bytes):
        detail = (
            f"{count} stripes of {size_bytes} bytes: at most {STRIPES_MAX} are taken, of"
            f" {STRIPE_BYTES_MIN} bytes at least"
        )
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return Stripe(index, count)


def most_stripes(size_bytes: int) -> int:
    """Return the most stripes of an update, at least 1."""
    return max(1, min(STRIPES_MAX, size_bytes // STRIPE_BYTES_MIN))
