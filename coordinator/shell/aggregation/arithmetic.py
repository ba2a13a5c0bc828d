"""What a fold computes of a span: weighted means and the outer step. Float32 in slot order, with
the same bits on any CPU; knows no files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.core.training.trust.weights import WHOLE
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.records import GROUP, Codec, groups
from hypergpu.tensors.topk import TopK

_LONE_SHARE = np.float32(0.5)


class UpdateWeight(NamedTuple):
    """How much one update counts."""

    share: np.float32
    """Its share in the mean; all shares together are 1."""
    clip: np.float32
    """The share times its clip: what its values are multiplied by."""


def fold_weights(weights: Sequence[int], clips: Sequence[int]) -> tuple[UpdateWeight, ...]:
    """Shares of updates from whole weights of at least 1, and their clips in 1/65,536.

    Whole clips leave the share as it is, bit for bit.
    """
    total = sum(weights)
    return tuple(
        UpdateWeight(np.float32(weight / total), np.float32(weight * clip / (total * WHOLE)))
        for weight, clip in zip(weights, clips, strict=True)
    )


def unclipped_rest(weights: Sequence[int], clips: Sequence[int]) -> np.float32:
    """What clips take from the sum of all shares."""
    lost_weight = sum(weight * (WHOLE - clip) for weight, clip in zip(weights, clips, strict=True))
    return np.float32(lost_weight / (sum(weights) * WHOLE))


class WeightedMean:
    """Sum of updates times their clipped weights, which add up to 1 at most.

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

    def add(self, codec: Codec, payload: Octets, weight: UpdateWeight) -> None:
        """Decode one update's span and add it."""
        factor = weight.clip
        for here, there in groups(codec, self._sum.size):
            total = self._sum[here]
            scratch = self._scratch[: total.size]
            values = codec.values(payload[there], scratch)
            if self._is_empty:
                np.multiply(values, factor, out=total)
            else:
                np.multiply(values, factor, out=scratch)
                np.add(total, scratch, out=total)
        self._is_empty = False

    def mean(self) -> Float32s:
        """The mean; valid until the next `begin`."""
        return self._sum


class SenderMean:
    """Weighted mean of each coordinate over those who sent it, for rounds with sparse updates.

    ``D_j = sum_i c_i w_i M_ij / sum_{i sent j} w_i``, with clips c. An update in a dense
    codec sends every coordinate, a sparse one those that it names, whatever their value. A
    coordinate that one alone of several updates sent is halved, for otherwise that sender would
    decide it. See docs/decisions/0009. Sums are float32 in the order of `add`.
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

    def add(self, codec: Codec, payload: Octets, weight: UpdateWeight) -> None:
        """Add what one update holds of the span."""
        if isinstance(codec, TopK):
            entries = codec.entries(payload, self._count)
            self._total[entries.places] += entries.values * weight.clip
            self._weights[entries.places] += weight.share
            self._senders[entries.places] += np.uint32(1)
            return
        for here, there in groups(codec, self._count):
            total = self._total[here]
            scratch = self._scratch[: total.size]
            np.multiply(codec.values(payload[there], scratch), weight.clip, out=scratch)
            np.add(total, scratch, out=total)
        self._dense_weight += weight.share
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
