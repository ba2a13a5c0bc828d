"""Reading the digits and holding out a fifth of them."""

import gzip
from importlib.resources import files

import numpy as np

from hypergpu.dataset.sampling import permutation
from hypergpu.workloads.workload import ArraySamples, Dataset

CLASSES = 10
PIXELS = 64
_SPLIT_SEED = 20_261_120
_TEST_SHARE = 5  # one in five


def digits() -> Dataset:
    """Digits as ``float32[n, 64]`` in [0, 1] with ``int64[n]`` targets.

    The held-out fifth has the same share of each digit, and is the same for every job.
    """
    packed = gzip.decompress(files(__package__).joinpath("digits.u8.gz").read_bytes())
    records = np.frombuffer(packed, dtype=np.uint8).reshape(-1, PIXELS + 1)
    inputs = records[:, :PIXELS].astype(np.float32) / np.float32(16)
    labels = records[:, PIXELS].astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for digit in range(CLASSES):
        members = np.flatnonzero(labels == digit)
        order = permutation(_SPLIT_SEED, digit, 0, len(members))
        is_test[members[order[: len(members) // _TEST_SHARE]]] = True
    return Dataset(
        *(ArraySamples(inputs[part], labels[part], labels[part]) for part in (~is_test, is_test))
    )
