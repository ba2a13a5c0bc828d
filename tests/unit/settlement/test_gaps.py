"""Nonces that nothing stored will use, and which of them are filled."""

import pytest

from coordinator.core.settlement.gaps import FILLS_MOST, Counts, filling, missing
from coordinator.core.settlement.sending import TransactionState

WAITING, MINED, FAILED = (
    TransactionState.WAITING,
    TransactionState.MINED,
    TransactionState.FAILED,
)


@pytest.mark.parametrize(
    ("rows", "newest_final", "nonces"),
    [
        ([], None, []),
        ([], 4, []),
        ([(5, WAITING)], 4, []),
        ([(3, FAILED), (5, WAITING)], 2, []),
        ([(8, WAITING), (7, WAITING)], 4, [5, 6]),
        ([(7, WAITING)], None, [5, 6]),
        ([(3, FAILED), (6, FAILED), (9, WAITING)], 2, [5]),
        # Something stored is in a block behind: the count is an old one.
        ([(7, MINED), (8, WAITING)], 4, []),
        ([(7, WAITING)], 5, []),
        ([(7, WAITING)], 9, []),
    ],
)
def test_a_gap_lies_between_what_is_used_and_what_waits(
    rows: list[tuple[int, TransactionState]], newest_final: int | None, nonces: list[int]
) -> None:
    assert list(missing(5, rows, newest_final)) == nonces


@pytest.mark.parametrize("counts", [Counts(5, 6, 5), Counts(5, 4, 5), Counts(5, 5, 4)])
def test_nothing_is_filled_before_two_answers_and_the_deep_one_are_alike(counts: Counts) -> None:
    assert filling(range(5, 7), counts, set()) == (
        (),
        "they are spent on nothing once that is so as deep as final blocks lie",
    )


def test_what_an_operators_command_has_signed_is_sent_in_its_place() -> None:
    counts = Counts(5, 5, 5)
    assert filling(range(5, 8), counts, set()) == ((5, 6, 7), "they are spent on nothing")
    assert filling(range(5, 8), counts, {7, 6}) == (
        (5, 6, 7),
        "what an operator's command has signed is sent (6, 7), others are spent on nothing",
    )


def test_a_gap_that_nobody_can_explain_is_told_and_left() -> None:
    counts = Counts(0, 0, 0)
    assert len(filling(range(FILLS_MOST), counts, set()).nonces) == FILLS_MOST
    nonces, reason = filling(range(FILLS_MOST + 1), counts, set())
    assert nonces == ()
    assert "restore the chain's state" in reason
