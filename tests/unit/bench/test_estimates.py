import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.ours.estimates import LEAST, IntervalEstimate, bootstrap_estimate, median_of


def test_the_median_lies_between_the_readings_that_a_sign_test_gives() -> None:
    # Of 20 readings the 6th and the 15th: Conover's table for a median at 95 %.
    assert median_of(range(1, 21)) == IntervalEstimate(10.5, 6.0, 15.0)


def test_the_order_of_readings_does_not_matter() -> None:
    assert (
        median_of([3, 1, 2, 6, 5, 4])
        == median_of([1, 2, 3, 4, 5, 6])
        == IntervalEstimate(3.5, 1, 6)
    )


def test_too_few_readings_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 readings have no interval"):
        median_of([1.0] * (LEAST - 1))


def test_nineteen_of_twenty_intervals_hold_what_readings_scatter_around() -> None:
    draw = np.random.default_rng(7)
    found = [median_of(list(draw.standard_cauchy(21))) for _ in range(500)]
    assert sum(each.low <= 0 <= each.high for each in found) >= 0.94 * len(found)


def test_a_figure_is_resampled_by_whole_groups() -> None:
    groups = [[float(number)] * 100 for number in range(30)]

    def mean(numbers: Sequence[int]) -> float:
        return statistics.mean(value for number in numbers for value in groups[number])

    found = bootstrap_estimate(mean, len(groups))
    # The standard error of 30 groups is 1.6; of 3,000 single readings it would be 0.16.
    assert found.value == 14.5
    assert 2.5 < found.high - found.value < 3.8
    assert 2.5 < found.value - found.low < 3.8
    assert bootstrap_estimate(mean, len(groups)) == found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (IntervalEstimate(0.0, -1.0, 0.9), ""),
        (IntervalEstimate(0.0, -1.0, 1.1), " not shown"),
        (IntervalEstimate(2.0, 1.1, 3.0), " MISSED"),
    ],
)
def test_a_limit_is_kept_missed_or_undecided(found: IntervalEstimate, said: str) -> None:
    assert found.verdict(1.0) == said
