"""Scales of integer schemes: largest magnitudes, and reciprocals that cannot overflow."""

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.layout import Float32s

_MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)
_INFINITE_BITS = np.uint32(0x7F80_0000)
_SCALE_MIN = np.float32(2.0**-126)


def largest_magnitude(values: Float32s) -> Float32s:
    """Largest absolute value along the last axis; infinite for a row with anything not finite.

    Magnitudes of floats order like their bits, and a maximum of integers is twice as fast.
    """
    bits = values.view(np.uint32) & _MAGNITUDE_BITS
    largest: npt.NDArray[np.uint32] = np.minimum(bits.max(axis=-1), _INFINITE_BITS)
    return largest.view(np.float32)


def flushed_reciprocal(scales: Float32s) -> Float32s:
    """Set scales below 2**-126 to zero, in place, and give 1 / scale with 0 for those.

    A reciprocal of a smaller scale could be infinite; such values wait in the residual until they
    grow.
    """
    is_usable = scales >= _SCALE_MIN
    scales *= is_usable
    reciprocals = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=reciprocals, where=is_usable)
    return reciprocals
