"""How far updates point the same way: what adding nodes is worth.

``n |mean|^2 / mean(|u_i|^2)`` over the updates u_i as they were said, each with equal weight: n for
equal updates, 1 for orthogonal ones, 0 for those that cancel. Only some records are looked at, so
that it costs little: one of 64, and about four of a small model.
"""

import math

import numpy as np
import numpy.typing as npt

from hypergpu.compression import RECORD, Scheme
from hypergpu.layout import Octets

_PERIOD_MAX = 64
_RECORDS_MIN = 4


class Agreement:
    """Sums over one walk. They are float64, record after record, so the span does not matter."""

    def __init__(self, updates_count: int, values_count: int) -> None:
        """Expect the updates' spans of a section of ``values_count`` values."""
        records = -(-values_count // RECORD)
        self._period = RECORD * min(_PERIOD_MAX, max(1, records // _RECORDS_MIN))
        self._norms = [0.0] * updates_count
        self._norm_of_sum = 0.0
        self._sums: list[npt.NDArray[np.float64]] = []
        self._scratch = np.empty(RECORD, np.float32)

    def add(self, index: int, scheme: Scheme, payload: Octets, span: range) -> None:
        """Take in what one update says of some values, ``span`` within the section."""
        if len(self._norms) < 2:
            return
        first = -(-span.start // self._period) * self._period
        starts = range(first - span.start, len(span), self._period)
        while len(self._sums) < len(starts):
            self._sums.append(np.zeros(RECORD))
        for total, start in zip(self._sums, starts, strict=False):
            stop = min(start + RECORD, len(span))
            record = payload[scheme.encoded_bytes(start) : scheme.encoded_bytes(stop)]
            values = scheme.values(record, self._scratch[: stop - start]).astype(np.float64)
            total[: values.size] += values
            self._norms[index] += _squares(values)

    def end_span(self) -> None:
        """Every update has given what it says of the span."""
        for total in self._sums:
            self._norm_of_sum += _squares(total)
            total[:] = 0

    def finished(self) -> float | None:
        """The agreement; None of a single update, and when nothing was said."""
        norms = math.fsum(self._norms)
        if len(self._norms) < 2 or not 0 < norms < math.inf:
            return None
        return self._norm_of_sum / norms


def _squares(values: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(values * values))
