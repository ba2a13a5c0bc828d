"""What every codec offers: float32 vectors to bytes and back in records.

A section of `count` values is a sequence of records of `RECORD` values; only the last may be
shorter. All full records of a codec have one size, so the bytes of values [start, start + n),
start a multiple of `RECORD`, begin at ``encoded_bytes(start)`` whatever follows.

Codecs round half to even with elementwise IEEE operations only, so that every CPU gives the same
bits.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from hypergpu.tensors.layout import Float32s, Octets

RECORD = 4096
"""Values in a full record, for every codec."""

GROUP = 8 * RECORD
"""Values handled at a time: 128 KiB of float32 and its temporaries stay in a core's L2 cache."""


class Flaw(Enum):
    """Why a payload of the right size cannot be used."""

    NOT_FINITE = "a value is not finite"
    MALFORMED = "its places do not ascend within their record"


class Codec(Protocol):
    """One way to write float32 values as fewer bytes."""

    @property
    def name(self) -> str:
        """The name that job files and deltas carry."""
        ...

    @property
    def is_lossless(self) -> bool:
        """Whether every value comes back with the bits that it had."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether a payload names the few values that it says, and nothing of the others."""
        return False

    @property
    def group(self) -> int:
        """Values that it handles at a time, a multiple of `RECORD`."""
        return GROUP

    @property
    def residual_decay(self) -> float:
        """What remains of the residual before new values are added to it."""
        return 1.0

    def encoded_bytes(self, count: int) -> int:
        """Exact size of ``count`` values."""
        ...

    def encode(self, values: Float32s, out: Octets) -> None:
        """Write contiguous ``values`` to exactly ``encoded_bytes(values.size)`` bytes.

        What is not finite is written so that `flaw` finds it.
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

    def encode_leaving_rest(self, total: Float32s, out: Octets, scratch: Float32s) -> None:
        """Like `encode`, and take from ``total``, in place, what the payload says of it.

        Args:
            scratch: As many values as ``total``; its content is lost.
        """
        self.encode(total, out)
        np.subtract(total, self.values(out, scratch), out=total)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """Return the flaw of whole records of ``count`` values; None when they are well formed.

        Without a flaw, every value that they decode to is finite.
        """
        ...


def groups(codec: Codec, count: int) -> Iterator[tuple[slice, slice]]:
    """Cut a section into the codec's groups: (values, bytes) slices."""
    for start in range(0, count, codec.group):
        stop = min(start + codec.group, count)
        yield slice(start, stop), slice(codec.encoded_bytes(start), codec.encoded_bytes(stop))


class RecordRun(NamedTuple):
    """Records of one length within a group: their values, their bytes, and the length."""

    values: slice
    bytes: slice
    length: int

    @property
    def rows(self) -> int:
        """Number of records."""
        return len(range(self.values.start, self.values.stop, self.length))


def record_runs(codec: Codec, count: int) -> Iterator[RecordRun]:
    """Cut a section into groups, each of them into its full records and a shorter last one."""
    for here, there in groups(codec, count):
        rest = (here.stop - here.start) % RECORD
        middle = here.stop - rest
        cut = there.start + codec.encoded_bytes(middle - here.start)
        if middle > here.start:
            yield RecordRun(slice(here.start, middle), slice(there.start, cut), RECORD)
        if rest:
            yield RecordRun(slice(middle, here.stop), slice(cut, there.stop), rest)
