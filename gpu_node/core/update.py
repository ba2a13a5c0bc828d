"""A finished update as the node knows it."""

import msgspec

from hypergpu.ids import Digest
from hypergpu.units import Bytes, Milliseconds, Samples


class Update(msgspec.Struct, frozen=True):
    """A finished update, by name, and what the node reports of its making."""

    digest: Digest
    size_bytes: Bytes
    inner_steps: int
    samples: Samples
    compute_ms: Milliseconds = Milliseconds(0)
    loss_first: float | None = None
    """None when it is not finite."""
    loss_last: float | None = None
