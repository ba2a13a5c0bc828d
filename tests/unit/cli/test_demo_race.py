"""The demo's table: what was measured here, and what is worked out from it."""

import pytest

from hypergpu.cli.demo.job import COUNTED_NODES, plan
from hypergpu.cli.demo.race import (
    SYNC_ROUNDS,
    SYNC_ROUNDS_SHORT,
    extrapolated_sync,
    race_strategies,
    sync_ratio,
)
from hypergpu.client.history import EvaluationPoint, History, RoundPoint
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples

FIXED = plan(5, is_short=True, worker="numpy")


def round_point(number: int, span_ms: int) -> RoundPoint:
    return RoundPoint(number=number, duration_ms=Milliseconds(span_ms))


def history(*rounds: RoundPoint, metric: float = 0.98, at_ms: int = 6000) -> History:
    only = EvaluationPoint(
        round=len(rounds),
        at_ms=Milliseconds(at_ms),
        loss=None,
        metric=metric,
        samples=Samples(1000),
        bytes_up=Bytes(0),
        bytes_down=Bytes(0),
    )
    return History(0, rounds, (only,), "accuracy")


def test_sync_is_extrapolated_with_its_first_step_counted_once() -> None:
    found = extrapolated_sync(
        [round_point(1, 9000), round_point(2, 4000), round_point(3, 6000)], 51
    )
    assert found.at_ms == 9000 + 50 * 5000
    assert found.how == (
        "extrapolated: 51 steps, the first 9.0 s and each other 5.0 s, as 2 took on average here"
    )
    assert extrapolated_sync([round_point(1, 9000)], 51).at_ms is None


def test_what_sync_takes_is_not_known_for_nodes_that_nobody_counted_it_with() -> None:
    train = TrainingRecorder()
    race = race_strategies(plan(4, is_short=True, worker="torch"), history(), train)
    assert [each.strategy for each in train.specs] == ["diloco"]
    assert (race[2].at_ms, sync_ratio(race)) == (None, None)
    assert "counted for another number of nodes" in race[2].how


class TrainingRecorder:
    """Remembers what was to be trained."""

    def __init__(self) -> None:
        self.specs: list[JobSpec] = []

    def __call__(self, spec: JobSpec, title: str) -> History:
        assert spec.strategy in title
        self.specs.append(spec)
        return history(round_point(1, 8000), round_point(2, 5000), at_ms=9000)


@pytest.mark.parametrize(("is_short", "rounds"), [(False, SYNC_ROUNDS), (True, SYNC_ROUNDS_SHORT)])
def test_diloco_is_trained_to_the_target_and_a_few_steps_of_sync(
    *, is_short: bool, rounds: int
) -> None:
    train = TrainingRecorder()
    chosen = plan(COUNTED_NODES, is_short=is_short, worker="torch")
    race = race_strategies(chosen, history(), train)
    diloco, sync = train.specs
    assert (diloco.strategy, diloco.evaluation.target) == ("diloco", chosen.target)
    assert (sync.strategy, sync.training.rounds, sync.codec.up) == ("sync", rounds, "fp32")
    assert [each.strategy for each in race] == ["aware", "diloco", "sync"]
    assert [each.at_ms for each in race] == [6000, 9000, 3000 + 5000 * chosen.sync_steps]


def test_a_fixed_demo_waits_for_everybody_and_plans_nothing() -> None:
    spec = plan(5, is_short=True, worker="torch", is_fixed=True).spec
    assert (spec.strategy, spec.round.deadline_ms, spec.round.quorum) == ("diloco", 0, 1.0)
    assert spec.pay.unit_price == 0
