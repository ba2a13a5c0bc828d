"""A finished update, by name."""

import msgspec

from hypergpu.ids import Digest
from hypergpu.units import Bytes, Milliseconds, Samples


class TrainedUpdate(msgspec.Struct, frozen=True):
    """A finished update, and the worker's report of its training."""

    digest: Digest
    size_bytes: Bytes
    inner_steps: int
    samples: Samples
    compute_ms: Milliseconds = Milliseconds(0)
    loss_first: float | None = None
    """None when it is not finite."""
    loss_last: float | None = None
