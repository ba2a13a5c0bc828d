"""What a fold computes of a span: weighted means, the outer step, and how far updates agree.
Float32 in slot order, with the same bits on any CPU; knows no files.

How far updates point the same way: the worth of more nodes, and who goes along.

The agreement of a round is ``n |mean|^2 / mean(|u_i|^2)`` over its updates u_i as they were sent,
with equal weights: n for equal updates, 1 for orthogonal ones, 0 for those that cancel. Each update
also has its cosine with the sum of the others. Only some records are looked at, so that it costs
little: one of 64, and about four of a small model; of many updates only the first values of each
record, since those are kept until all have been added.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.quantisation import GROUP, RECORD, Codec, groups
from hypergpu.tensors.topk import TopK
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

    def add(self, codec: Codec, payload: Octets, weight: np.float32) -> None:
        """Decode one update's span and add it."""
        for here, there in groups(codec, self._sum.size):
            total = self._sum[here]
            scratch = self._scratch[: total.size]
            values = codec.values(payload[there], scratch)
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

    ``D_j = sum_i w_i M_ij / sum_{i sent j} w_i``. An update in a dense codec sends every
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

    def add(self, codec: Codec, payload: Octets, weight: np.float32) -> None:
        """Add what one update holds of the span."""
        if isinstance(codec, TopK):
            entries = codec.entries(payload, self._count)
            self._total[entries.places] += entries.values * weight
            self._weights[entries.places] += weight
            self._senders[entries.places] += np.uint32(1)
            return
        for here, there in groups(codec, self._count):
            total = self._total[here]
            scratch = self._scratch[: total.size]
            np.multiply(codec.values(payload[there], scratch), weight, out=scratch)
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


class OuterStep:
    """Nesterov SGD on the mean pseudo-gradient, as `torch.optim.SGD(nesterov=True)` does it.

    ``m <- mu * m + D``, then ``x <- x - lr * (D + mu * m)``.
    """

    def __init__(self, outer: Outer) -> None:
        self._learning_rate = np.float32(outer.learning_rate)
        self._momentum = np.float32(outer.momentum)
        self._scratch = np.empty(GROUP, np.float32)

    def take(
        self,
        mean: Float32s,
        parameters: Float32s,
        momentum: Float32s | None,
        *,
        out_parameters: Float32s,
        out_momentum: Float32s | None,
    ) -> None:
        """Step some coordinates, a group at a time so that temporaries stay in cache.

        Args:
            momentum: None stands for zero.
            out_momentum: None when the outer momentum is zero.
        """
        for start in range(0, mean.size, GROUP):
            here = slice(start, min(start + GROUP, mean.size))
            step = self._scratch[: here.stop - start]
            if out_momentum is None:
                np.multiply(mean[here], self._learning_rate, out=step)
            else:
                out = out_momentum[here]
                if momentum is None:
                    np.copyto(out, mean[here])
                else:
                    np.multiply(momentum[here], self._momentum, out=out)
                    np.add(out, mean[here], out=out)
                np.multiply(out, self._momentum, out=step)
                np.add(step, mean[here], out=step)
                np.multiply(step, self._learning_rate, out=step)
            np.subtract(parameters[here], step, out=out_parameters[here])


def is_all_finite(vector: Float32s) -> bool:
    """Whether no value is infinite or not a number."""
    # A finite sum proves it at a quarter of the cost; large finite values may still overflow the
    # sum.
    return bool(np.isfinite(vector.sum()) or np.isfinite(vector).all())


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

    def add(self, index: int, codec: Codec, payload: Octets, span: range) -> None:
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
            record = payload[codec.encoded_bytes(start) : codec.encoded_bytes(stop)]
            values = codec.values(record, self._scratch[: stop - start])[: self._width]
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
