"""1,797 handwritten digits and a model of them that needs no torch. The digits are carried inside
the package so that they are there offline and without scikit-learn.

The records are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), the set that
scikit-learn ships: 64 grey values of 0 to 16, then the digit, a byte each.
"""

import gzip
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from hypergpu.partitions import permutation
from hypergpu.workloads.datasets import Array, ArraySamples, Dataset
from hypergpu.workloads.entry import Options
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.examples import Example, labelled_images
from hypergpu.workloads.workload import Parameters

CLASSES = 10
PIXELS = 64
_SPLIT_SEED = 20_261_120
_TEST_SHARE = 5  # one in five


def digits() -> Dataset:
    """Digits as ``float32[n, 64]`` in [0, 1] with ``int64[n]`` targets.

    The held-out fifth has the same share of each digit, and is the same for every job.
    """
    content = gzip.decompress(files("hypergpu.workloads").joinpath("digits.u8.gz").read_bytes())
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, PIXELS + 1)
    inputs = records[:, :PIXELS].astype(np.float32) / np.float32(16)
    labels = records[:, PIXELS].astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for digit in range(CLASSES):
        members = np.flatnonzero(labels == digit)
        order = permutation(_SPLIT_SEED, digit, 0, len(members))
        is_test[members[order[: len(members) // _TEST_SHARE]]] = True
    train, test = (
        ArraySamples(inputs[part], labels[part], labels[part]) for part in (~is_test, is_test)
    )
    return Dataset(train, test)


def draw_digits(inputs: Array) -> Array:
    """Digits as images, ``uint8[b, 8, 8]``."""
    images: Array = (inputs.reshape(-1, 8, 8) * 255).astype(np.uint8)
    return images


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

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """See `ExampleWorkload`."""
        return labelled_images(draw_digits(inputs), targets)

    def outputs(self, parameters: Parameters, inputs: Array) -> list[int | str]:
        """Predicted digits."""
        return [*map(int, _log_softmax(parameters, inputs).argmax(axis=1))]


def _log_softmax(parameters: Parameters, inputs: Array) -> NDArray[np.float32]:
    logits = np.einsum("bi,io->bo", inputs, parameters["weight"]) + parameters["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    result: NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def digits_softmax(_options: Options) -> DigitsSoftmax:
    """Builder of ``digits-softmax``."""
    return DigitsSoftmax()
