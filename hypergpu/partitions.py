"""The samples of a participant: a pure function of seeds that every node computes for itself.

Only raw Philox bits and stable sorting are used, since numpy promises their streams across
versions, which it does not for `Generator.shuffle` or `Generator.dirichlet`. Samples are counted,
never drawn with replacement: a pass over a partition visits each of its samples exactly once.
"""

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_local = threading.local()


class Range(Protocol):
    """Positions [start, start + count) of a stream."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...


class Sharding(NamedTuple):
    """How a dataset is divided. ``alpha`` 0 is IID: one partition of everything, whatever
    ``partitions`` says.
    """

    partitions: int
    alpha: float
    seed: int


def _bits(count: int, *key: int | str) -> NDArray[np.uint64]:
    """``uint64[count]``, keyed by the meaning of the draw."""
    name = "\0".join(["hypergpu.sampling", *map(str, key)])
    generator = getattr(_local, "generator", None)
    if generator is None:
        generator = _local.generator = np.random.Philox(0)
    # A generator that begins anew: to make one takes ten times as long as most draws.
    generator.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.zeros(4, np.uint64),
            "key": np.frombuffer(blake3(name.encode()).digest(16), "<u8"),
        },
        "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    bits: NDArray[np.uint64] = generator.random_raw(count)
    return bits


@lru_cache(maxsize=8)
def permutation(seed: int, partition: int, number: int, size: int) -> Indices:
    """``int64[size]``: the order in which pass ``number`` visits a partition. Read-only. O(n log
    n).
    """
    order = np.argsort(_bits(size, "pass", seed, partition, number), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def stream_indices(members: Indices, partition: int, seed: int, ranges: Sequence[Range]) -> Indices:
    """Dataset indices at positions of a partition's endless stream, in the order of ``ranges``.

    Args:
        members: ``int64[n]``, the partition's dataset indices; n is at least 1.
        partition: The partition's number.
        seed: The job's data seed.
        ranges: Runs of positions; position p is in pass ``p // n``.
    """
    pieces: list[Indices] = []
    size = len(members)
    for run in ranges:
        position, end = run.start, run.start + run.count
        while position < end:
            number, offset = divmod(position, size)
            part_length = min(end - position, size - offset)
            pieces.append(
                members[permutation(seed, partition, number, size)[offset : offset + part_length]]
            )
            position += part_length
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


CLASSES_MAX = 10_000
"""For a skew by classes: each takes one look at all samples."""


def partition_indices(labels: NDArray[np.int64], sharding: Sharding) -> list[Indices]:
    """Divide a dataset: every sample in exactly one partition, none of them empty.

    Dirichlet label skew: each label's samples are dealt out in proportions drawn from a symmetric
    Dirichlet distribution (Hsu et al. 2019, arXiv:1909.06335), then empty partitions take one
    sample from the largest.

    Args:
        labels: ``int64[n]``.
        sharding: Partitions, concentration and seed.

    Raises:
        ValueError: There are fewer samples than partitions, or the numbers make no sense.
    """
    if len(labels) == 0:
        raise ValueError("the dataset is empty")
    if sharding.alpha == 0:
        return [np.arange(len(labels), dtype=np.int64)]
    if sharding.alpha < 0 or not math.isfinite(sharding.alpha):
        raise ValueError(f"the Dirichlet concentration is {sharding.alpha}; it must be above 0")
    if not 1 <= sharding.partitions <= len(labels):
        raise ValueError(f"{len(labels)} samples cannot make {sharding.partitions} partitions")
    owners = np.empty(len(labels), dtype=np.int64)
    classes = np.unique(labels)
    if len(classes) > CLASSES_MAX:
        raise ValueError(
            f"{len(classes)} classes cannot be skewed, {CLASSES_MAX} at most can."
            " Fix: name another field by options.label, or take sharding iid"
        )
    for label in classes:
        members = np.flatnonzero(labels == label)
        shuffled_members = members[
            np.argsort(_bits(len(members), "deal", sharding.seed, int(label)), kind="stable")
        ]
        shares = _dirichlet(sharding, int(label))
        bounds = np.floor(np.cumsum(shares) * len(members) + 0.5).astype(np.int64)
        owners[shuffled_members] = np.searchsorted(
            bounds[:-1], np.arange(len(members)), side="right"
        )
    _fill_empty(owners, sharding.partitions)
    return [np.flatnonzero(owners == partition) for partition in range(sharding.partitions)]


def _fill_empty(owners: Indices, partitions: int) -> None:
    counts = np.bincount(owners, minlength=partitions)
    for partition in np.flatnonzero(counts == 0):
        largest = int(np.argmax(counts))
        owners[np.flatnonzero(owners == largest)[-1]] = partition
        counts[largest] -= 1
        counts[partition] = 1


def _dirichlet(sharding: Sharding, label: int) -> NDArray[np.float64]:
    """``float64[partitions]`` that sum to 1, on a grid of 2^-32 so that a last-bit difference
    between two machines' logarithms does not move a sample.
    """
    logs = [
        _log_gamma_draw(sharding.alpha, f"{sharding.seed}/{label}/{k}")
        for k in range(sharding.partitions)
    ]
    top = max(logs)
    weights = np.array([round(math.exp(value - top) * 2**32) for value in logs], dtype=np.float64)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _log_gamma_draw(alpha: float, key: str) -> float:
    """Logarithm of a Gamma(alpha, 1) draw (Marsaglia and Tsang 2000), which does not underflow for
    small alpha.
    """
    d = alpha + 1.0 - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    attempt = 0
    while True:
        u1, u2, u3, u4 = ((_bits(4, "gamma", key, attempt) >> np.uint64(11)) + 0.5) / 2.0**53
        x = math.sqrt(-2.0 * math.log(u1)) * math.cos(2.0 * math.pi * u2)
        v = (1.0 + c * x) ** 3
        if v > 0 and math.log(u3) < 0.5 * x * x + d - d * v + d * math.log(v):
            return math.log(d * v) + math.log(u4) / alpha
        attempt += 1
