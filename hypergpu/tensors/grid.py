"""Grids of magnitudes for the few values that a sparse record says: two numbers a record.

Sums are elementwise additions in a fixed order, so that every CPU gives the same bits.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.floats import Uint16s, bf16_bits, floats_of_bf16
from hypergpu.tensors.int8 import flushed_reciprocal, largest_magnitude
from hypergpu.tensors.layout import Float32s, Octets

_INFINITE_BITS = np.uint16(0x7F80)
_START_BITS_END = np.uint16((127 + 127) << 7)
_STEP_BITS_END = np.uint16((127 + 124) << 7)
"""Bits of 2**127 and 2**124: a start and seven steps below them are finite together."""

_EVEN_CODE_MAX = np.float32(7)


class Fitted(NamedTuple):
    """A grid for each row, as bfloat16 bits ``uint16[rows, 2]``, and each magnitude's code."""

    numbers: Uint16s
    codes: Octets


class Grid(Protocol):
    """A few magnitudes, found anew for each row."""

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        ...

    def fit(self, magnitudes: Float32s) -> Fitted:
        """Choose the numbers for ``float32[rows, count]``; what is not finite gives numbers that
        `is_finite` denies.
        """
        ...

    def magnitudes(self, numbers: Uint16s, codes: Octets) -> Float32s:
        """The magnitudes that codes stand for, ``float32[rows, count]``."""
        ...

    def is_finite(self, numbers: Uint16s) -> bool:
        """Whether every code gives a finite magnitude. Negative numbers have larger bits, and are
        denied too: no encoder writes one.
        """
        ...


class TwoCentroids(Grid):
    """The mean of the magnitudes up to their mean, and the mean of those above it: one bit."""

    code_bits = 1

    def fit(self, magnitudes: Float32s) -> Fitted:
        """See `Grid`."""
        rows, count = magnitudes.shape
        width = 1 << (count - 1).bit_length()
        shares = np.zeros((rows, width), np.float32)
        # Divided before they are added, so that no sum overflows; exact, by a power of two.
        np.multiply(magnitudes, np.float32(1 / width), out=shares[:, :count])
        mean = _row_sums(shares) * np.float32(width / count)
        is_upper = magnitudes > mean[:, None]
        upper = np.zeros_like(shares)
        np.multiply(shares[:, :count], is_upper, out=upper[:, :count])
        shares -= upper
        upper_counts = is_upper.sum(axis=1, dtype=np.int32)
        counts = np.stack((count - upper_counts, upper_counts), axis=1)
        factors = np.float32(width) / np.maximum(counts, 1).astype(np.float32)
        means = np.stack((_row_sums(shares), _row_sums(upper)), axis=1) * factors
        return Fitted(bf16_bits(means), is_upper.view(np.uint8))

    def magnitudes(self, numbers: Uint16s, codes: Octets) -> Float32s:
        """See `Grid`."""
        lower, upper = np.split(floats_of_bf16(numbers), 2, axis=1)
        chosen: Float32s = np.where(codes.view(np.bool_), upper, lower)
        return chosen

    def is_finite(self, numbers: Uint16s) -> bool:
        """See `Grid`."""
        return bool((numbers < _INFINITE_BITS).all())


class EvenSteps(Grid):
    """From the smallest magnitude to the largest in seven even steps: three bits.

    The first number is the smallest, the second the step; a step below 2**-126 is zero.
    """

    code_bits = 3

    def fit(self, magnitudes: Float32s) -> Fitted:
        """See `Grid`."""
        start = magnitudes.min(axis=1)
        step = (largest_magnitude(magnitudes) - start) / _EVEN_CODE_MAX
        numbers = bf16_bits(np.stack((start, step), axis=1))
        rounded = floats_of_bf16(numbers)
        reciprocals = flushed_reciprocal(rounded[:, 1])
        quotients = (magnitudes - rounded[:, :1]) * reciprocals[:, None]
        np.rint(quotients, out=quotients)
        np.clip(quotients, np.float32(0), _EVEN_CODE_MAX, out=quotients)
        return Fitted(bf16_bits(rounded), quotients.astype(np.uint8) & np.uint8(7))

    def magnitudes(self, numbers: Uint16s, codes: Octets) -> Float32s:
        """See `Grid`."""
        rounded = floats_of_bf16(numbers)
        magnitudes = codes.astype(np.float32)
        magnitudes *= rounded[:, 1:]
        magnitudes += rounded[:, :1]
        return magnitudes

    def is_finite(self, numbers: Uint16s) -> bool:
        """See `Grid`."""
        ends = np.array([_START_BITS_END, _STEP_BITS_END])
        return bool((numbers < ends).all())


def _row_sums(values: Float32s) -> Float32s:
    """Sum ``float32[rows, width]`` over its rows by halves; the width is a power of two."""
    while (half := values.shape[1] // 2) > 0:
        values = values[:, :half] + values[:, half:]
    sums: npt.NDArray[np.float32] = values[:, 0]
    return sums
