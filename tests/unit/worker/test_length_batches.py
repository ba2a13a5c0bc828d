"""Batches by length, over drawn lengths."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_node.shell.worker.farm.length_batches import length_batches


@given(
    lengths=st.lists(st.integers(0, 300), max_size=80),
    tokens_most=st.integers(1, 1000),
    items_most=st.integers(1, 20),
)
def test_each_item_is_in_one_batch_within_both_limits(
    lengths: list[int], tokens_most: int, items_most: int
) -> None:
    batches = list(length_batches(lengths, tokens_most=tokens_most, items_most=items_most))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= items_most
        longest = max(lengths[place] for place in batch)
        assert len(batch) == 1 or len(batch) * longest <= tokens_most
    longest_lengths = [lengths[batch[0]] for batch in batches]
    assert longest_lengths == sorted(longest_lengths, reverse=True)
