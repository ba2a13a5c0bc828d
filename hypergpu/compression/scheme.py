"""What every compression scheme offers: float32 vectors to bytes and back in records.

A section of `count` values is a sequence of records of `RECORD` values; only the last may be
shorter. All full records of a scheme have one size, so the bytes of values [start, start + n),
start a multiple of `RECORD`, begin at ``encoded_bytes(start)`` whatever follows. A sparser scheme
joins by the same rule.

Schemes round half to even with elementwise IEEE operations only, so that every CPU gives the same
bits.
"""

from collections.abc import Iterator
from typing import Protocol

from hypergpu.layout import Float32s, Octets

RECORD = 4096
"""Values in a full record, for every scheme."""

GROUP = 8 * RECORD
"""Values handled at a time: 128 KiB of float32 and its temporaries stay in a core's L2 cache."""


class Scheme(Protocol):
    """One way to write float32 values as fewer bytes."""

    @property
    def name(self) -> str:
        """The name that job files and deltas carry."""
        ...

    @property
    def is_lossless(self) -> bool:
        """Whether every value comes back with the bits that it had."""
        return False

    def encoded_bytes(self, count: int) -> int:
        """Exact size of ``count`` values."""
        ...

    def encode(self, values: Float32s, out: Octets) -> None:
        """Write contiguous ``values`` to exactly ``encoded_bytes(values.size)`` bytes.

        What is not finite is written so that `is_finite` denies it.
        """
        ...

    def decode(self, payload: Octets, out: Float32s) -> None:
        """Read exactly ``encoded_bytes(out.size)`` bytes that begin at a record."""
        ...

    def values(self, payload: Octets, scratch: Float32s) -> Float32s:
        """Like `decode` into ``scratch``, or a view of ``payload`` where that needs no work.

        Reading a view instead of a copy makes folding float32 updates a third faster.
        """
        self.decode(payload, scratch)
        return scratch

    def is_finite(self, payload: Octets) -> bool:
        """Whether every value that these whole records can decode to is finite."""
        ...


def groups(scheme: Scheme, count: int) -> Iterator[tuple[slice, slice]]:
    """Cut a section into cache-sized groups: (values, bytes) slices."""
    for start in range(0, count, GROUP):
        stop = min(start + GROUP, count)
        yield slice(start, stop), slice(scheme.encoded_bytes(start), scheme.encoded_bytes(stop))
