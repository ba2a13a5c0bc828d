"""Rounds in reasons, as people count them."""

import pytest

from hypergpu.journal.text import round_from_one


@pytest.mark.parametrize(
    ("journalled", "told"),
    [
        ("round 0: 2 taking part", "round 1: 2 taking part"),
        (
            "too slow; tries again in round 63",
            "too slow; tries again in round 64",
        ),
        ("round 4 has 10 samples, 3 more are funded", "round 5 has 10 samples, 3 more are funded"),
        (
            "round #5 has 10 samples, 3 more are funded",
            "round #5 has 10 samples, 3 more are funded",
        ),
        ("accuracy 0.97 by the model of round 12", "accuracy 0.97 by the model of round 12"),
        ("every round closes", "every round closes"),
    ],
)
def test_rounds_count_from_one_and_models_as_they_do(journalled: str, told: str) -> None:
    assert round_from_one(journalled) == told
