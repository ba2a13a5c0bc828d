"""Softmax regression on the digits: small enough to train without torch and to be killed hundreds
of times.
"""

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.digits.load import CLASSES, PIXELS, digits
from hypergpu.workloads.entry import Options
from hypergpu.workloads.workload import Array, Dataset, Parameters, Sums


class DigitsSoftmax:
    """Logits are a linear function of the 64 grey values. Implements `NumpyWorkload`."""

    def load(self, data_dir: str) -> Dataset:
        """The built-in digits."""
        return digits()

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Zeros, whatever the seed: the loss is convex."""
        return {
            "bias": np.zeros(CLASSES, dtype=np.float32),
            "weight": np.zeros((PIXELS, CLASSES), dtype=np.float32),
        }

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Mean cross-entropy and its gradient."""
        logs = _log_softmax(parameters, inputs)  # [b, classes]
        rows = np.arange(len(targets))
        loss = -float(logs[rows, targets].mean())
        slope = np.exp(logs)
        slope[rows, targets] -= np.float32(1)
        slope /= np.float32(len(targets))
        # einsum's plain loop, and not BLAS, whose threads may add in another order.
        return loss, {"bias": slope.sum(axis=0), "weight": np.einsum("bi,bo->io", inputs, slope)}

    def evaluate(self, parameters: Parameters, inputs: Array, targets: Array) -> Sums:
        """Cross-entropy and correct predictions."""
        logs = _log_softmax(parameters, inputs)
        loss = -float(logs[np.arange(len(targets)), targets].sum(dtype=np.float64))
        return Sums(loss, float((logs.argmax(axis=1) == targets).sum()), len(targets))


def _log_softmax(parameters: Parameters, inputs: Array) -> NDArray[np.float32]:
    logits = np.einsum("bi,io->bo", inputs, parameters["weight"]) + parameters["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    result: NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def build(_options: Options) -> DigitsSoftmax:
    """Builder of ``digits-softmax``."""
    return DigitsSoftmax()
