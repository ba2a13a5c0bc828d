"""How far updates point the same way: the worth of more nodes, and who goes along.

The agreement of a round is ``n |mean|^2 / mean(|u_i|^2)`` over its updates u_i as they were sent,
with equal weights: n for equal updates, 1 for orthogonal ones, 0 for those that cancel. Each update
also has its cosine with the sum of the others. Only some records are looked at, so that it costs
little: one of 64, and about four of a small model; of many updates only the first values of each
record, since those are kept until all have been added.
"""

import math

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.compression import RECORD, Scheme
from hypergpu.tensors.layout import Octets

_PERIOD_MAX = 64
_RECORDS_MIN = 4
_KEPT_VALUES = 1 << 20
"""Values kept of a record over all updates: 4 MiB."""
_KEPT_MIN = 64
_ROUNDING = 1e-12
"""A smaller part of the sum's squared norm is only a rounding error."""


class Agreement:
    """Sums of one sweep: for each update ``u . S`` and ``|u|^2``, where S is the sum of all; and
    ``|S|^2``. They are float64, record after record, so the span does not matter.
    """

    def __init__(self, updates_count: int, values_count: int) -> None:
        """Expect the updates' spans of a section of ``values_count`` values."""
        records = -(-values_count // RECORD)
        self._period = RECORD * min(_PERIOD_MAX, max(1, records // _RECORDS_MIN))
        self._count = updates_count
        self._width = min(RECORD, max(_KEPT_MIN, _KEPT_VALUES // max(1, updates_count)))
        self._rows: list[npt.NDArray[np.float32]] = []
        """A record's first values each, one row per update."""
        self._records_in_span = 0
        self._with_sum = np.zeros(updates_count)
        self._norms = np.zeros(updates_count)
        self._norm_of_sum = 0.0
        self._scratch = np.empty(RECORD, np.float32)

    def add(self, index: int, scheme: Scheme, payload: Octets, span: range) -> None:
        """Keep some of an update's values of ``span``, which counts within the section."""
        if self._count < 2:
            return
        first = -(-span.start // self._period) * self._period
        starts = range(first - span.start, len(span), self._period)
        self._records_in_span = len(starts)
        while len(self._rows) < len(starts):
            self._rows.append(np.zeros((self._count, self._width), np.float32))
        for rows, start in zip(self._rows, starts, strict=False):
            stop = min(start + RECORD, len(span))
            record = payload[scheme.encoded_bytes(start) : scheme.encoded_bytes(stop)]
            values = scheme.values(record, self._scratch[: stop - start])[: self._width]
            rows[index, : values.size] = values
            rows[index, values.size :] = 0

    def end_span(self) -> None:
        """Take in what every update has given of the span."""
        for rows in self._rows[: self._records_in_span]:
            total = np.zeros(self._width)
            for row in rows:
                total += row
            self._norm_of_sum += _dot(total, total)
            for index, row in enumerate(rows):
                values = row.astype(np.float64)
                self._with_sum[index] += _dot(values, total)
                self._norms[index] += _dot(values, values)
        self._records_in_span = 0

    def agreement(self) -> float | None:
        """The round's agreement; None for a single update, and when all updates are empty."""
        norms = math.fsum(self._norms)
        if self._count < 2 or not 0 < norms < math.inf:
            return None
        return self._norm_of_sum / norms

    def cosines(self) -> tuple[float | None, ...]:
        """Cosine of each update with the sum of the others, in [-1, 1]; 0 for an empty update.

        None for a single update, and where the others together are empty.
        """
        return tuple(
            self._cosine(float(with_sum), float(norm))
            for with_sum, norm in zip(self._with_sum, self._norms, strict=True)
        )

    def _cosine(self, with_sum: float, norm: float) -> float | None:
        others = self._norm_of_sum - 2 * with_sum + norm
        is_known = math.isfinite(others + norm + with_sum)
        if self._count < 2 or not is_known or others <= _ROUNDING * self._norm_of_sum:
            return None
        if norm == 0:
            return 0.0
        return max(-1.0, min(1.0, (with_sum - norm) / math.sqrt(others * norm)))


def _dot(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(left * right))
