"""Plans in a closed loop: nodes with true speeds and lines, what is measured of them."""

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
from msgspec.structs import replace as msgspec_replace

from coordinator.core.training.plan.decision import ModelSizes, RoundPlan
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import SPARSE_CODECS, Aware, OuterSettings
from hypergpu.units import Bytes
from tests.unit.plan.fleet import SIZES, Played, PlayedFleet, Truth, names, replace_truth, spec

N0 = NodeId("n0")
CLEAN = Truth()
FLEETS = {
    "clean": [CLEAN] * 5,
    "fast": [Truth(50, 1000, 1000, 50)] * 5,
    "lossy": [Truth(60, 20, 50, 150, 0.01)] * 5,
}


def _fleet(truths: list[Truth], sharding: str = "iid", *, seed: int = 0) -> PlayedFleet:
    job = spec(nodes=len(truths), sharding=sharding)
    return PlayedFleet(job, dict(zip(names(len(truths)), truths, strict=True)), seed=seed)


def _play(fleet: PlayedFleet, rounds: int) -> list[Played]:
    return [fleet.play() for _ in range(rounds)]


def _visible_choices(plan: RoundPlan) -> object:
    return {n: (p.codec, p.inner_steps) for n, p in plan.nodes.items()}, frozenset(plan.resting)


@pytest.mark.parametrize("name", FLEETS)
def test_after_ten_rounds_forecasts_are_within_a_quarter(name: str) -> None:
    rounds = _play(_fleet(FLEETS[name]), 16)
    assert mean(round_.error() for round_ in rounds[10:]) <= 0.25


@pytest.mark.parametrize("name", FLEETS)
def test_nodes_compute_for_as_much_of_the_time_as_the_user_wants(name: str) -> None:
    rounds = _play(_fleet(FLEETS[name]), 16)
    assert mean(round_.utilisation for round_ in rounds[4:]) >= 0.85 - 0.05


def test_nobody_makes_the_others_wait_round_after_round() -> None:
    """Steps are held against noise, not against what stays."""
    fleet = _fleet([CLEAN] * 8, seed=3)
    rounds = _play(fleet, 24)[16:]
    late = [mean(r.times_ms[node] for r in rounds) for node in fleet.truths]
    assert max(late) <= 1.05 * mean(late)


def test_nothing_changes_from_round_to_round_while_nothing_happens() -> None:
    rounds = _play(_fleet(FLEETS["clean"]), 16)
    plans = [repr(_visible_choices(round_.plan)) for round_ in rounds[4:]]
    changes = sum(one != other for one, other in pairwise(plans))
    assert changes <= 2, "who does not quite fill the round is set right after five of them"


def test_a_line_that_falls_tenfold_is_forecast_again_within_three_rounds() -> None:
    fleet = _fleet(FLEETS["clean"])
    _play(fleet, 8)
    replace_truth(fleet, N0, replace(CLEAN, up_mbit_s=2.0, down_mbit_s=5.0))
    rounds = _play(fleet, 8)
    assert all(round_.error() <= 0.25 for round_ in rounds[3:])
    assert not any(round_.cut for round_ in rounds[3:])
    replace_truth(fleet, N0, CLEAN)
    rounds = _play(fleet, 6)
    assert all(round_.error() <= 0.25 for round_ in rounds[3:])


def test_all_lines_may_fall_tenfold() -> None:
    fleet = _fleet(FLEETS["clean"])
    _play(fleet, 8)
    for node in list(fleet.truths):
        replace_truth(fleet, node, replace(CLEAN, up_mbit_s=2.0, down_mbit_s=5.0))
    rounds = _play(fleet, 8)
    assert all(not round_.cut for round_ in rounds[3:])
    assert mean(round_.utilisation for round_ in rounds[4:]) >= 0.75


def test_a_slower_device_gets_fewer_steps_and_goes_on_taking_part() -> None:
    fleet = _fleet(FLEETS["clean"])
    before = _play(fleet, 8)[-1].plan.nodes[N0].inner_steps
    replace_truth(fleet, N0, replace(CLEAN, step_ms=150.0))
    rounds = _play(fleet, 6)
    after = rounds[-1].plan.nodes[N0].inner_steps
    assert 0.25 * before < after < 0.4 * before
    assert not any(round_.cut for round_ in rounds[3:])


def test_speeds_of_ten_to_one_add_up() -> None:
    steps_ms = (20.0, 30.0, 50.0, 80.0, 100.0, 140.0, 170.0, 200.0)
    together = _speed(_fleet([Truth(step_ms=step_ms) for step_ms in steps_ms]))
    alone = sum(_speed(_fleet([Truth(step_ms=step_ms)])) for step_ms in steps_ms)
    assert together >= 0.85 * alone


def _speed(fleet: PlayedFleet) -> float:
    rounds = _play(fleet, 14)[4:]
    return sum(round_.samples for round_ in rounds) / sum(round_.took_ms for round_ in rounds)


def test_on_own_data_nobody_strays_from_the_middle_by_more_than_twice() -> None:
    steps_ms = (40.0, 50.0, 60.0, 150.0)
    fleet = _fleet([Truth(step_ms=step_ms) for step_ms in steps_ms], "dirichlet")
    last = _play(fleet, 10)[-1].plan
    middle = last.memory.inner_steps
    assert all(middle / 2 <= part.inner_steps <= 2 * middle for part in last.nodes.values())


def test_a_node_that_was_away_takes_part_at_once() -> None:
    fleet = _fleet(FLEETS["clean"])
    _play(fleet, 5)
    for _ in range(4):
        assert N0 not in fleet.play(absent=[N0]).plan.nodes
    assert N0 in fleet.play().plan.nodes


def test_no_round_waits_for_a_node_on_a_hopeless_line() -> None:
    hopeless = replace(CLEAN, up_mbit_s=0.02, down_mbit_s=0.05)
    rounds = _play(_fleet([hopeless, *FLEETS["clean"][1:]]), 30)[3:]
    alone = _play(_fleet(FLEETS["clean"][1:]), 30)[3:]
    assert all(r.plan.nodes[N0].rounds > 1 for r in rounds)
    assert sum(r.took_ms for r in rounds) <= 1.03 * sum(r.took_ms for r in alone)


FAST = Truth(50, 1000, 1000, 10)
SLOW = Truth(50, 2, 5, 150, 0.01)


def _unmeasured_fleet(truth: Truth, aware: Aware | None = None) -> PlayedFleet:
    return PlayedFleet(spec(nodes=5, aware=aware), dict.fromkeys(names(5), truth))


def test_a_jobs_first_round_is_sparse_both_ways_and_steps_without_momentum() -> None:
    plan = _unmeasured_fleet(FAST).play().plan
    assert {mine.codec for mine in plan.nodes.values()} == {"topk256"}
    assert (plan.down, plan.is_sparse) == ("topk256", True)


def test_a_job_without_sparse_codecs_begins_with_the_finest() -> None:
    plan = _unmeasured_fleet(FAST, Aware(sparsest="int4")).play().plan
    assert {mine.codec for mine in plan.nodes.values()} == {"int4"}
    assert (plan.down, plan.is_sparse) == ("int4", False)


@pytest.mark.parametrize(("truth", "is_sparse"), [(FAST, False), (SLOW, True)])
def test_the_first_round_does_not_hold_the_second_to_its_family(
    truth: Truth, *, is_sparse: bool
) -> None:
    fleet = _unmeasured_fleet(truth)
    fleet.play()
    plan = fleet.play().plan
    assert plan.is_sparse == is_sparse
    assert all((mine.codec in SPARSE_CODECS) == is_sparse for mine in plan.nodes.values())


@pytest.mark.parametrize(("most_bytes", "is_sparse"), [(256 << 10, False), ((256 << 10) + 1, True)])
def test_only_large_updates_are_sparse_over_slow_lines(most_bytes: int, *, is_sparse: bool) -> None:
    ratio = most_bytes / SIZES.update_bytes["int4"]
    sizes = {codec: Bytes(round(ratio * size)) for codec, size in SIZES.update_bytes.items()}
    fleet = _unmeasured_fleet(replace(SLOW, down_mbit_s=0.1, up_mbit_s=0.05))
    fleet.sizes = ModelSizes(sizes, SIZES.model_bytes)
    fleet.job = msgspec_replace(fleet.job, outer=OuterSettings(learning_rate=1.0, momentum=0.0))
    fleet.play()
    plan = fleet.play().plan
    assert {mine.codec in SPARSE_CODECS for mine in plan.nodes.values()} == {is_sparse}
