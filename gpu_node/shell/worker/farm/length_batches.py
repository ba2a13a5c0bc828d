"""Batches of items of like length, so that little is padded."""

from collections.abc import Iterator, Sequence


def length_batches(
    lengths: Sequence[int], *, tokens_most: int, items_most: int
) -> Iterator[list[int]]:
    """Places of items by batch, the longest first, so that memory runs out at once or never.

    Args:
        lengths: Length of each item, in tokens or any measure that grows with them.
        tokens_most: Padded length of a batch at most; a longer item is a batch of its own.
        items_most: Items of a batch at most.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        longest = lengths[batch[0]] if batch else lengths[place]
        is_full = len(batch) >= items_most or (len(batch) + 1) * longest > tokens_most
        if batch and is_full:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
