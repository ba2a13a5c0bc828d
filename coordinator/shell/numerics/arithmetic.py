"""Weighted mean and outer step on vectors in memory: elementwise float32, on any CPU alike."""

from collections.abc import Sequence

import numpy as np

from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.compression import GROUP, Scheme, groups
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.units import Samples


def weights_of(samples: Sequence[Samples]) -> tuple[np.float32, ...]:
    """Share of each update in the mean; every count is at least 1."""
    total = sum(samples)
    return tuple(np.float32(count / total) for count in samples)


class WeightedMean:
    """Sum of updates times their weights, for one span of coordinates at a time.

    The sum is float32 in the order of `add`. Against exact arithmetic each coordinate is off by at
    most ``(n + 2) * 2**-24 * sum(|w_i * d_i|)`` for n updates, far below what int8 or even bfloat16
    lose; a float64 sum would move twice the bytes.
    """

    def __init__(self, span: int) -> None:
        self._total = np.empty(span, np.float32)
        self._scratch = np.empty(GROUP, np.float32)
        self._mean = self._total[:0]
        self._is_empty = True

    def begin(self, count: int) -> None:
        """Start over with ``count`` coordinates."""
        self._mean = self._total[:count]
        self._is_empty = True

    def add(self, scheme: Scheme, payload: Octets, weight: np.float32) -> None:
        """Decode one update's span and add it."""
        for here, there in groups(scheme, self._mean.size):
            total = self._mean[here]
            scratch = self._scratch[: total.size]
            values = scheme.values(payload[there], scratch)
            if self._is_empty:
                np.multiply(values, weight, out=total)
            else:
                np.multiply(values, weight, out=scratch)
                np.add(total, scratch, out=total)
        self._is_empty = False

    def finished(self) -> Float32s:
        """The mean; valid until the next `begin`."""
        return self._mean


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
                self._push(mean[here], momentum, here, out_momentum[here])
                np.multiply(out_momentum[here], self._momentum, out=step)
                np.add(step, mean[here], out=step)
                np.multiply(step, self._learning_rate, out=step)
            np.subtract(parameters[here], step, out=out_parameters[here])

    def _push(self, mean: Float32s, momentum: Float32s | None, here: slice, out: Float32s) -> None:
        if momentum is None:
            np.copyto(out, mean)
        else:
            np.multiply(momentum[here], self._momentum, out=out)
            np.add(out, mean, out=out)


def is_all_finite(vector: Float32s) -> bool:
    """Whether no value is infinite or not a number."""
    # A finite sum proves it at a quarter of the cost; large finite values may still overflow the
    # sum.
    return bool(np.isfinite(vector.sum()) or np.isfinite(vector).all())
