import random
from functools import cache
from statistics import median

import pytest

from coordinator.core.transfer.draw import transfer_us
from hypergpu.units import Bytes
from tests.unit.transfer.measured_cells import PULLS, THROUGHPUTS, Pull, Throughput

DRAWS = 31


def cell_id(cell: Pull | Throughput) -> str:
    return cell.name


def pulled_s(cell: Pull) -> list[float]:
    """Drawn times of the cell's pull, shortest first."""
    times_us = [
        transfer_us(cell.path, cell.size_bytes, random.Random(seed).random) for seed in range(DRAWS)
    ]
    return sorted((time_us + cell.path.rtt_us / 2) / 1e6 for time_us in times_us)


@cache
def moved_mbit_per_s(cell: Throughput) -> list[float]:
    """Drawn rates of the cell: how much is through when its time is up, by bisection."""

    def rate(seed: int) -> float:
        low, high = 1, 1 << 40
        while high - low > low // 50 + 1:
            middle = (low + high) // 2
            took_us = transfer_us(cell.path, Bytes(middle), random.Random(seed).random)
            low, high = (middle, high) if took_us <= cell.seconds * 1e6 else (low, middle)
        return low * 8 / 1e6 / cell.seconds

    return sorted(map(rate, range(DRAWS)))


PULLED = {cell.name: pulled_s(cell) for cell in PULLS}
PULL_ERRORS = {cell.name: median(PULLED[cell.name]) / cell.seconds - 1 for cell in PULLS}


def test_half_of_the_measured_pulls_are_met_within_a_twentieth() -> None:
    assert median(map(abs, PULL_ERRORS.values())) <= 0.05


@pytest.mark.parametrize("cell", [cell for cell in PULLS if not cell.path.loss], ids=cell_id)
def test_a_pull_without_losses_is_met_within_a_fifth(cell: Pull) -> None:
    assert abs(PULL_ERRORS[cell.name]) <= 0.2


@pytest.mark.parametrize("cell", [cell for cell in PULLS if cell.path.loss], ids=cell_id)
def test_a_pull_with_losses_took_what_the_model_often_draws(cell: Pull) -> None:
    drawn = PULLED[cell.name]
    assert drawn[0] * 0.9 <= cell.seconds <= drawn[-1]
    assert abs(PULL_ERRORS[cell.name]) <= 1


@pytest.mark.parametrize("cell", THROUGHPUTS, ids=cell_id)
def test_a_measured_rate_is_one_that_the_model_draws(cell: Throughput) -> None:
    drawn = moved_mbit_per_s(cell)
    # One run a cell; the worst is CUBIC at 5 %, measured at 0.21 where 0.4 to 1.6 are drawn.
    assert drawn[0] / 2.5 <= cell.mbit_per_s <= drawn[-1] * 1.7


def test_the_rates_are_met_within_a_quarter_on_average() -> None:
    errors = [median(moved_mbit_per_s(cell)) / cell.mbit_per_s - 1 for cell in THROUGHPUTS]
    assert median(map(abs, errors)) <= 0.25
