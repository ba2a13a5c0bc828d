"""How counts are said."""

import pytest

from hypergpu.units import are, several


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 rounds are over"), (1, "1 round is over"), (2, "2 rounds are over")],
)
def test_one_of_something_is_said_as_one(count: int, text: str) -> None:
    assert f"{several(count, 'round')} {are(count)} over" == text


def test_a_noun_may_have_another_ending() -> None:
    assert [several(count, "batch", "es") for count in (1, 2)] == ["1 batch", "2 batches"]
