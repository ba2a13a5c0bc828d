"""Weighted means of updates, for one span of coordinates at a time: float32, in slot order."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.compression import GROUP, Scheme, TopK, groups
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.units import Samples

_LONE_SHARE = np.float32(0.5)


def weights_of(samples: Sequence[Samples]) -> tuple[np.float32, ...]:
    """Share of each update in the mean; every count is at least 1."""
    total = sum(samples)
    return tuple(np.float32(count / total) for count in samples)


class WeightedMean:
    """Sum of updates times their weights, which add up to 1.

    The sum is float32 in the order of `add`. Against exact arithmetic each coordinate is off by at
    most ``(n + 2) * 2**-24 * sum(|w_i * d_i|)`` for n updates, far below what int8 or even bfloat16
    lose; a float64 sum would move twice the bytes.
    """

    def __init__(self, span: int) -> None:
        self._total = np.empty(span, np.float32)
        self._scratch = np.empty(GROUP, np.float32)
        self._sum = self._total[:0]
        self._is_empty = True

    def begin(self, count: int) -> None:
        """Start over with ``count`` coordinates."""
        self._sum = self._total[:count]
        self._is_empty = True

    def add(self, scheme: Scheme, payload: Octets, weight: np.float32) -> None:
        """Decode one update's span and add it."""
        for here, there in groups(scheme, self._sum.size):
            total = self._sum[here]
            scratch = self._scratch[: total.size]
            values = scheme.values(payload[there], scratch)
            if self._is_empty:
                np.multiply(values, weight, out=total)
            else:
                np.multiply(values, weight, out=scratch)
                np.add(total, scratch, out=total)
        self._is_empty = False

    def mean(self) -> Float32s:
        """The mean; valid until the next `begin`."""
        return self._sum


class SenderMean:
    """Weighted mean of each coordinate over those who sent it, for rounds with sparse updates.

    ``D_j = sum_i w_i M_ij / sum_{i sent j} w_i``. An update in a dense scheme sends every
    coordinate, a sparse one those that it names, whatever their value. A coordinate that one alone
    of several updates sent is halved, for otherwise that sender would decide it. See
    docs/decisions/0009. Sums are float32 in the order of `add`.
    """

    def __init__(self, span: int, updates_count: int) -> None:
        self._updates_count = updates_count
        self._total = np.empty(span, np.float32)
        self._weights = np.empty(span, np.float32)
        self._senders: npt.NDArray[np.uint32] = np.empty(span, np.uint32)
        self._scratch = np.empty(GROUP, np.float32)
        self._count = 0
        self._dense_weight = np.float32(0)
        self._dense_senders = 0

    def begin(self, count: int) -> None:
        """Start over with ``count`` coordinates."""
        self._count = count
        for vector in (self._total, self._weights, self._senders):
            vector[:count] = 0
        self._dense_weight = np.float32(0)
        self._dense_senders = 0

    def add(self, scheme: Scheme, payload: Octets, weight: np.float32) -> None:
        """Add what one update holds of the span."""
        if isinstance(scheme, TopK):
            entries = scheme.entries(payload, self._count)
            self._total[entries.places] += entries.values * weight
            self._weights[entries.places] += weight
            self._senders[entries.places] += np.uint32(1)
            return
        for here, there in groups(scheme, self._count):
            total = self._total[here]
            scratch = self._scratch[: total.size]
            np.multiply(scheme.values(payload[there], scratch), weight, out=scratch)
            np.add(total, scratch, out=total)
        self._dense_weight += weight
        self._dense_senders += 1

    def mean(self) -> Float32s:
        """The mean, once; valid until the next `begin`. Coordinates that nobody sent are zero."""
        mean, weights = self._total[: self._count], self._weights[: self._count]
        senders = self._senders[: self._count]
        weights += self._dense_weight
        senders += np.uint32(self._dense_senders)
        np.divide(mean, weights, out=mean, where=senders > 0)
        if self._updates_count > 1:
            np.multiply(mean, _LONE_SHARE, out=mean, where=senders == 1)
        return mean
