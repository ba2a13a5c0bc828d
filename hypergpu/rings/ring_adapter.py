"""The adapter that a ring trained, as its owner takes it: what its layers' files mean."""

import msgspec

from hypergpu.rings.ring_training import RingTraining

_NUMBER_BYTES = 4


def trained_values(content: bytes) -> bytes:
    """The values in the file of a layer, which begins with them.

    Args:
        content: Values, two moments of the optimizer as large each, and the steps, as float32.
    """
    count = (len(content) // _NUMBER_BYTES - 1) // 3
    return content[: _NUMBER_BYTES * count]


class RingAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """The newest stored round of a training through a ring."""

    job: str
    training: RingTraining
    layers: int
    """Layers of the base. The file of each has the values, the optimizer's two moments and the
    steps, as little-endian float32: see `StageTraining`.
    """
    rounds: int
    """Rounds so far."""
    step: int
    """Optimizer steps so far."""
    loss: float
    """Mean of the round's tokens that count."""
    held_out_loss: float | None = None
    """The same of rows that are held out; None: none are."""
