"""How far updates point the same way: what adding nodes is worth, and who goes along.

Of the whole round ``n |mean|^2 / mean(|u_i|^2)`` over the updates u_i as they were said, each with
equal weight: n for equal updates, 1 for orthogonal ones, 0 for those that cancel. Of each update
its cosine with the sum of the others. Only some records are looked at, so that it costs little: one
of 64, and about four of a small model; for the cosines of many updates only the first values of
each, since those are kept until all have been added.
"""

import math

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.compression import RECORD, Scheme
from hypergpu.tensors.layout import Octets

_PERIOD_MAX = 64
_RECORDS_MIN = 4
_KEPT_VALUES = 1 << 20
"""Of a record, over all updates: 4 MiB."""
_KEPT_MIN = 64
_NOTHING = 1e-12
"""Of the sum's norm: less is what is left of rounding."""


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
        self._each = _Each(updates_count)

    def add(self, index: int, scheme: Scheme, payload: Octets, span: range) -> None:
        """Take in what one update says of some values, ``span`` within the section."""
        if len(self._norms) < 2:
            return
        first = -(-span.start // self._period) * self._period
        starts = range(first - span.start, len(span), self._period)
        while len(self._sums) < len(starts):
            self._sums.append(np.zeros(RECORD))
        for place, (total, start) in enumerate(zip(self._sums, starts, strict=False)):
            stop = min(start + RECORD, len(span))
            record = payload[scheme.encoded_bytes(start) : scheme.encoded_bytes(stop)]
            values = scheme.values(record, self._scratch[: stop - start]).astype(np.float64)
            total[: values.size] += values
            self._norms[index] += _squares(values)
            self._each.keep(place, index, values)

    def end_span(self) -> None:
        """Every update has given what it says of the span."""
        for place, total in enumerate(self._sums):
            self._norm_of_sum += _squares(total)
            self._each.end_record(place, total)
            total[:] = 0

    def finished(self) -> float | None:
        """The agreement; None of a single update, and when nothing was said."""
        norms = math.fsum(self._norms)
        if len(self._norms) < 2 or not 0 < norms < math.inf:
            return None
        return self._norm_of_sum / norms

    def cosines(self) -> tuple[float | None, ...]:
        """Of each update with the sum of the others, in [-1, 1]; 0 of one that says nothing.

        None of a single update, and where the others together say nothing.
        """
        return self._each.cosines() if len(self._norms) > 1 else (None,) * len(self._norms)


class _Each:
    """For each update ``u . S`` and ``|u|^2``, where S is the sum of all; and ``|S|^2``."""

    def __init__(self, updates_count: int) -> None:
        self._width = min(RECORD, max(_KEPT_MIN, _KEPT_VALUES // max(1, updates_count)))
        self._count = updates_count
        self._kept: list[npt.NDArray[np.float32]] = []
        self._filled: set[int] = set()
        self._with_sum = np.zeros(updates_count)
        self._norms = np.zeros(updates_count)
        self._norm_of_sum = 0.0

    def keep(self, place: int, index: int, values: npt.NDArray[np.float64]) -> None:
        while len(self._kept) <= place:
            self._kept.append(np.zeros((self._count, self._width), np.float32))
        self._filled.add(place)
        kept = self._kept[place][index]
        count = min(values.size, self._width)
        kept[:count] = values[:count]
        kept[count:] = 0

    def end_record(self, place: int, total: npt.NDArray[np.float64]) -> None:
        if place not in self._filled:
            return
        self._filled.discard(place)
        part, kept = total[: self._width], self._kept[place]
        self._norm_of_sum += _squares(part)
        for index, row in enumerate(kept):
            values = row.astype(np.float64)
            self._with_sum[index] += float(np.add.reduce(values * part))
            self._norms[index] += _squares(values)

    def cosines(self) -> tuple[float | None, ...]:
        return tuple(
            self._cosine(float(with_sum), float(norm))
            for with_sum, norm in zip(self._with_sum, self._norms, strict=True)
        )

    def _cosine(self, with_sum: float, norm: float) -> float | None:
        others = self._norm_of_sum - 2 * with_sum + norm
        if not math.isfinite(others + norm + with_sum) or others <= _NOTHING * self._norm_of_sum:
            return None
        if norm == 0:
            return 0.0
        return max(-1.0, min(1.0, (with_sum - norm) / math.sqrt(others * norm)))


def _squares(values: npt.NDArray[np.float64]) -> float:
    return float(np.add.reduce(values * values))
