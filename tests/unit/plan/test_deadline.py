from coordinator.core.plan.deadline import Arrival, deadline
from coordinator.core.plan.decision import PlanMemory, RoundPlan
from coordinator.core.plan.reissue import reissue
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples

A, B, C, D = (NodeId(name) for name in "abcd")


def _at(mean_ms: int, spread_ms: int = 100, samples: int = 640) -> Arrival:
    return Arrival(Milliseconds(mean_ms), Milliseconds(spread_ms), Samples(samples))


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


def _plan(deadline_ms: int) -> RoundPlan:
    memory = PlanMemory(20, 0, is_sparse=False)
    return RoundPlan(3, {}, {}, Milliseconds(deadline_ms), "int4", False, memory, "")


def test_a_shard_that_will_be_late_goes_to_the_fastest_idle_node() -> None:
    found = reissue(
        _plan(10_000),
        Milliseconds(6000),
        pending={A: _at(9000), B: _at(20_000)},
        idle={C: _at(9500), D: _at(9200)},
    )
    assert [(one.late, one.idle) for one in found] == [(B, D)]
    assert found[0].reason == ("0% likely by the deadline of 10 s; the other node forecasts 9.2 s")


def test_nothing_is_issued_again_before_half_of_the_round() -> None:
    late, idle = {B: _at(20_000)}, {C: _at(9000)}
    assert not reissue(_plan(10_000), Milliseconds(4999), pending=late, idle=idle)
    assert reissue(_plan(10_000), Milliseconds(5000), pending=late, idle=idle)


def test_nothing_is_issued_again_to_a_node_that_would_be_late_too() -> None:
    late, idle = {B: _at(20_000)}, {C: _at(12_000)}
    assert not reissue(_plan(10_000), Milliseconds(6000), pending=late, idle=idle)


def test_nothing_is_issued_again_in_a_round_that_waits_for_everybody() -> None:
    late, idle = {B: _at(20_000)}, {C: _at(12_000)}
    assert not reissue(_plan(0), Milliseconds(6000), pending=late, idle=idle)
