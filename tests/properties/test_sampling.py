"""What holds for every way of dividing and visiting samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.dataset.sampling import Sharding, partition_indices, permutation, stream_indices
from hypergpu.digest import digest_of
from hypergpu.statements.assignment import SampleRange
from hypergpu.units import Samples

GOLDEN_PERMUTATION = "ee290988c009ad9d03a44892290b45f7bbf8e367e89c1aab1a3f37ef2e3a0aac"
GOLDEN_SPLIT = "81bc8daa67e592142596f9de4af81a1c016ee7b17bedb2ac225aa5aec1cbbd63"

seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, size=st.integers(1, 300), number=st.integers(0, 50))
def test_a_pass_visits_every_sample_exactly_once(seed: int, size: int, number: int) -> None:
    members = np.arange(100, 100 + size)
    visited = stream_indices(members, 0, seed, [SampleRange(number * size, Samples(size))])
    assert sorted(visited) == list(members)


@given(
    seed=seeds,
    size=st.integers(1, 60),
    start=st.integers(0, 500),
    counts=st.lists(st.integers(0, 90), max_size=6),
)
def test_cutting_a_stretch_into_ranges_changes_nothing(
    seed: int, size: int, start: int, counts: list[int]
) -> None:
    members = np.arange(size)
    runs, position = [], start
    for count in counts:
        runs.append(SampleRange(position, Samples(count)))
        position += count
    whole = stream_indices(members, 3, seed, [SampleRange(start, Samples(sum(counts)))])
    np.testing.assert_array_equal(stream_indices(members, 3, seed, runs), whole)


@given(
    seed=seeds,
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=200),
    alpha=st.floats(0.01, 100.0),
    share=st.floats(0.0, 1.0),
)
def test_dirichlet_partitions_are_disjoint_complete_and_never_empty(
    seed: int, labels: list[int], alpha: float, share: float
) -> None:
    partitions = 1 + round(share * (min(len(labels), 30) - 1))
    parts = partition_indices(np.array(labels), Sharding(partitions, alpha, seed))
    assert len(parts) == partitions
    assert min(map(len, parts)) > 0
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


@given(count=st.integers(1, 500), partitions=st.integers(1, 50))
def test_iid_is_one_partition_of_everything(count: int, partitions: int) -> None:
    (part,) = partition_indices(np.zeros(count, np.int64), Sharding(partitions, 0.0, 0))
    assert list(part) == list(range(count))


def test_a_small_concentration_skews_labels_and_a_large_one_does_not() -> None:
    labels = np.arange(4000) % 10
    skews = []
    for alpha in (0.05, 1000.0):
        parts = partition_indices(labels, Sharding(5, alpha, 1))
        counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
        skews.append(counts.max(axis=0).mean() / 400)
    assert skews[0] > 0.7
    assert skews[1] < 0.25


def test_passes_partitions_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(permutation(seed, partition, number, 50))
        for seed in range(3)
        for partition in range(3)
        for number in range(3)
    }
    assert len(orders) == 27


def test_a_permutation_is_the_same_everywhere_and_forever() -> None:
    order = permutation(7, 1, 2, 1797).astype("<i8")
    assert digest_of(order.tobytes()) == GOLDEN_PERMUTATION


def test_a_dirichlet_split_is_the_same_everywhere_and_forever() -> None:
    parts = partition_indices(np.arange(1797) % 10, Sharding(5, 0.3, 7))
    joined = b"".join(part.astype("<i8").tobytes() + b"|" for part in parts)
    assert digest_of(joined) == GOLDEN_SPLIT


@pytest.mark.parametrize(
    ("labels", "sharding", "reason"),
    [
        ([], Sharding(1, 0.0, 0), "the dataset is empty"),
        ([0, 1], Sharding(3, 0.5, 0), "2 samples cannot make 3 partitions"),
        ([0, 1], Sharding(2, -1.0, 0), "it must be above 0"),
        ([0, 1], Sharding(2, float("nan"), 0), "it must be above 0"),
    ],
)
def test_an_impossible_split_says_why(labels: list[int], sharding: Sharding, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partition_indices(np.array(labels, np.int64), sharding)
