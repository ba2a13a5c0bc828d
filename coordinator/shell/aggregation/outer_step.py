"""The outer step on vectors in memory: elementwise float32, with the same bits on any CPU."""

import numpy as np

from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.compression import GROUP
from hypergpu.tensors.layout import Float32s


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
