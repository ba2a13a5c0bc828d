"""Benchmarks of network-aware training: what they read off reports, and what they run."""

import pytest

from benchmarks.awareness import GRID, Fixed, fixed_tree, longest_bad_stretch
from benchmarks.efficiency import (
    computing_share,
    failing_world,
    forecast_errors,
    kills,
    summed_throughput,
    throughput,
)
from benchmarks.ours.awareness.flower import FlowerRun, reached_by_flower
from benchmarks.ours.awareness.runs import WORLDS, NotReachedError, target_of
from benchmarks.ours.job_files import text_of
from benchmarks.ours.table import PartFigures, measure_part
from hypergpu.jobfile.reading import parse_job
from hypergpu.units import Milliseconds, Samples
from hypergpu.user.client.history import RoundPoint
from netsim.measure.lateness import ALWAYS_VALID
from netsim.network.timeline import require_real_faults
from netsim.network.world_file import parse_world, read_world_file
from netsim.run.report import RunReport

FILES = sorted(WORLDS.rglob("*.toml"))
TWO_ALIKE = """
[job]
workload = "null"
[job.training]
batch_size = 10
[[nodes]]
profile = "A"
count = 2
step_floor_ms = 100
"""


def report(*rounds: RoundPoint) -> RunReport:
    return RunReport(
        seed=1,
        world="test",
        backend="tunnel",
        phase="finished",
        reason="all rounds are done",
        rounds=rounds,
        metric=None,
        verdict=ALWAYS_VALID,
        metric_name="accuracy",
        target=0.97,
        evaluations=(),
        to_target=None,
    )


def point(
    number: int, ended_ms: int, *, samples: int = 0, error: float | None = None
) -> RoundPoint:
    return RoundPoint(
        number=number,
        duration_ms=Milliseconds(1),
        ended_ms=Milliseconds(ended_ms),
        samples=Samples(samples),
        forecast_error=error,
    )


@pytest.mark.parametrize("path", [each for each in FILES if each.parent.name != "jobs"], ids=str)
def test_every_world_of_the_benchmarks_has_a_job_that_its_nodes_can_do(path: object) -> None:
    world = read_world_file(WORLDS / str(path))
    assert world.job is not None
    assert world.job.training.nodes == len(world.nodes)
    require_real_faults(world)


@pytest.mark.parametrize("plan", GRID, ids=lambda plan: plan.name)
def test_a_fixed_setting_is_a_job(plan: Fixed) -> None:
    spec = parse_job(text_of(fixed_tree(plan)))
    assert (spec.strategy, spec.training.inner_steps) == ("diloco", plan.inner_steps)
    assert spec.codec.up == plan.codec
    assert (spec.round.deadline_ms == 0) == (plan.quorum == 1.0)


def test_there_are_at_least_twelve_fixed_settings() -> None:
    assert len(set(GRID)) >= 12


def test_kills_take_about_a_fifth_of_the_nodes_and_are_the_same_for_a_seed() -> None:
    text = failing_world(1)
    assert text == failing_world(1)
    assert text != failing_world(2)
    faults = parse_world(text.replace("job =", "# job ="), source="test").faults
    moments = {fault.at_us for fault in faults}
    assert {fault.kind for fault in faults} == {"crash"}
    assert 0.12 < len(faults) / len(moments) / 8 < 0.28


def test_a_longer_script_of_kills_begins_as_a_shorter_one() -> None:
    short, whole = kills(1, 300.0), kills(1, 900.0)
    assert whole[: len(short)] == short
    assert short[-1].at_s < 300.0 <= whole[len(short)].at_s


def test_flower_reaches_the_target_between_two_rounds_as_everybody_does() -> None:
    run = FlowerRun(ends_s=(10.0, 20.0, 30.0), metrics=(0.5, 0.96, 0.98), updates=(8, 8, 7))
    there = reached_by_flower(run)
    assert (there.at_ms, there.rounds) == (25000, 3)


def test_flower_that_never_was_at_the_target_has_no_time() -> None:
    with pytest.raises(NotReachedError, match=r"0\.960 after 2 rounds"):
        reached_by_flower(FlowerRun(ends_s=(1.0, 2.0), metrics=(0.96, 0.9), updates=(8, 8)))


def test_throughput_leaves_the_first_rounds_out() -> None:
    rounds = (point(1, 5000, samples=10), point(2, 6000, samples=20), point(3, 8000, samples=40))
    assert throughput(report(*rounds), 1) == 20.0
    assert throughput(report(*rounds), 0) == pytest.approx(70 / 8)


def test_nodes_that_compute_all_the_time_are_used_wholly() -> None:
    world = parse_world(TWO_ALIKE, source="test")
    assert summed_throughput(world) == 200.0
    rounds = (point(1, 1000, samples=200), point(2, 3000, samples=200))
    assert computing_share(report(*rounds), world, 0) == pytest.approx(400 / 600)
    assert computing_share(report(*rounds), world, 1) == pytest.approx(0.5)


def test_forecasts_count_once_they_rest_on_measurements() -> None:
    rounds = [point(number, number, error=number / 100) for number in range(1, 15)]
    assert forecast_errors(report(*rounds)) == [0.11, 0.12, 0.13, 0.14]
    assert forecast_errors(report(*rounds[:4])) == [0.03, 0.04]


def test_a_target_that_was_missed_is_a_note_and_no_figure() -> None:
    with pytest.raises(NotReachedError):
        target_of(report(), "aware")

    def part() -> PartFigures:
        target_of(report(), "aware-1-c")
        raise AssertionError("nothing was reached")

    missed_part = measure_part("grade c", part)
    assert not missed_part.metrics
    assert "MISSED, grade c: aware-1-c never reached 0.97" in missed_part.notes[0]


def test_a_bad_stretch_counts_rounds_on_end_after_the_first_two() -> None:
    errors = (0.9, 0.9, 0.4, 0.1, 0.3, None, 0.26, 0.25, 0.5)
    rounds = [point(n, 1000 * n, error=error) for n, error in enumerate(errors, 1)]
    assert longest_bad_stretch(rounds) == 2
    assert longest_bad_stretch(rounds[:2]) == 0
