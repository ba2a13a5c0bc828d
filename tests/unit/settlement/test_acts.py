"""Which transactions of an operator's commands the outbox takes in."""

import pytest

from coordinator.core.settlement.acts import taken_in


@pytest.mark.parametrize(
    ("stored", "used", "final", "acts", "nonces"),
    [
        (8, 8, 0, set(), []),
        (8, 11, 0, {8, 9, 10}, [8, 9, 10]),
        # Not sent, or in no block yet.
        (8, 8, 0, {8}, [8]),
        (8, 9, 0, {8, 9}, [8, 9]),
        # Those before it were taken in at an earlier start, or took the place of something.
        (8, 11, 0, {2, 7, 8, 9, 10}, [8, 9, 10]),
        # Somebody else's nonce: nothing behind it follows on.
        (8, 11, 0, {9, 10}, []),
        (8, 11, 0, {8, 10}, [8]),
        # Nothing was settled yet: what came before them is nobody's matter.
        (None, 0, 0, set(), []),
        (None, 3, 0, set(), []),
        (None, 3, 0, {1, 2}, [1, 2]),
        (None, 3, 0, {0, 2, 3}, [2, 3]),
        (None, 3, 0, {0, 4}, []),
        (None, 3, 2, {0, 1, 2, 3}, [2, 3]),
        (None, 3, 3, {1, 2}, []),
    ],
)
def test_what_follows_on_without_a_gap_is_taken_in(
    stored: int | None, used: int, final: int, acts: set[int], nonces: list[int]
) -> None:
    assert list(taken_in(stored, used, final, acts)) == nonces
