"""The price of accepted work: whole numbers, rounded once for each node."""

import pytest

from hypergpu.journal.worth import cost, most_for, samples_for, worth


@pytest.mark.parametrize(
    ("price", "score", "amount"), [(3, 0, 0), (3, 333_333, 0), (3, 333_334, 1), (7, 1_000_000, 7)]
)
def test_the_worth_of_a_score_is_rounded_down(price: int, score: int, amount: int) -> None:
    assert worth(price, score) == amount


def test_the_cost_of_a_job_is_rounded_for_each_node() -> None:
    assert worth(3, 500_000) == 1
    assert cost(3, [500_000, 500_000]) == 2
    assert worth(3, 1_000_000) == 3


def test_samples_never_cost_more_than_the_most_for_them() -> None:
    for samples in range(1, 250):
        assert worth(7, samples * 10_000) <= most_for(7, samples)
        assert samples_for(7, most_for(7, samples)) >= samples
