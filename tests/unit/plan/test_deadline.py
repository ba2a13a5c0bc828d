from coordinator.core.plan.deadline import UpdateArrival, deadline
from hypergpu.units import Milliseconds, Samples


def _at(mean_ms: int, spread_ms: int = 100, samples: int = 640) -> UpdateArrival:
    return UpdateArrival(Milliseconds(mean_ms), Milliseconds(spread_ms), Samples(samples))


def test_all_are_waited_for_that_come_together() -> None:
    found = deadline([_at(5000), _at(5200), _at(5400), _at(5100)], 3)
    assert 5400 + 300 < found < 1.25 * 6000


def test_one_that_is_three_times_as_slow_is_not_waited_for() -> None:
    assert deadline([_at(5000), _at(5200), _at(5400), _at(15_000)], 3) < 8000


def test_it_is_never_before_the_quorum_is_likely() -> None:
    assert deadline([_at(5000), _at(5200), _at(5400), _at(15_000)], 4) > 15_000


def test_the_slow_one_is_waited_for_that_does_most_of_the_work() -> None:
    slow = _at(15_000, samples=20_000)
    assert deadline([_at(5000), _at(5200), _at(5400), slow], 3) > 15_000


def test_no_round_is_so_short_that_its_deadline_is_none() -> None:
    assert deadline([_at(0, 0), _at(0, 0)], 1) == 160
    assert deadline([_at(1, 0), _at(10, 0)], 2) == 160
