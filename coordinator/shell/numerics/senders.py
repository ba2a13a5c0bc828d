"""Weighted mean of each coordinate over those who sent it, for rounds with sparse updates.

``D_j = sum_i w_i M_ij / sum_{i sent j} w_i``. An update in a dense scheme sends every coordinate,
a sparse one those that it names, whatever their value. A coordinate that one alone of several
updates sent is halved, for otherwise that sender would decide it. See docs/decisions/0009.
"""

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.compression import GROUP, Scheme, TopK, groups
from hypergpu.tensors.layout import Float32s, Octets

_LONE_SHARE = np.float32(0.5)


class SenderMean:
    """The mean over senders, for one span of coordinates at a time.

    Sums are float32 in the order of `add`, as those of `WeightedMean`.
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
        """Add what one update says of the span."""
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

    def finished(self) -> Float32s:
        """The mean; valid until the next `begin`. Nobody's coordinates are zero."""
        mean, weights = self._total[: self._count], self._weights[: self._count]
        senders = self._senders[: self._count]
        weights += self._dense_weight
        senders += np.uint32(self._dense_senders)
        np.divide(mean, weights, out=mean, where=senders > 0)
        if self._updates_count > 1:
            np.multiply(mean, _LONE_SHARE, out=mean, where=senders == 1)
        return mean
