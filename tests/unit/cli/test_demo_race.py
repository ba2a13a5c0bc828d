"""The demo's table: what was measured here, and what is worked out from it."""

from hypergpu.cli.demo.job import plan
from hypergpu.cli.demo.race import (
    COLUMNS,
    Race,
    Runner,
    estimated_fixed,
    extrapolated_sync,
    measured,
    rows,
)
from hypergpu.cli.demo.rivals import SYNC_ROUNDS, SYNC_ROUNDS_SHORT, raced
from hypergpu.cli.show.history import EvaluationPoint, History, RoundPoint
from hypergpu.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples

AWARE = plan(5, is_short=True, worker="torch")
FIXED = plan(5, is_short=True, worker="numpy")


def round_point(number: int, span_ms: int, *, steps: int = 20, codec: str = "int4") -> RoundPoint:
    return RoundPoint(
        number=number,
        duration_ms=Milliseconds(span_ms),
        inner_steps=steps,
        codecs={codec: 5},
    )


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


def test_a_job_that_was_trained_is_told_as_it_was() -> None:
    assert measured("aware", history(), 0.97) == ("aware", 6000, "measured")
    assert measured("aware", history(metric=0.5), 0.97).at_ms is None


def test_diloco_is_estimated_from_rounds_that_were_like_its_own() -> None:
    told = history(
        round_point(1, 2000),
        round_point(2, 4000),
        round_point(3, 90_000, steps=7),
        round_point(4, 90_000, codec="topk64"),
    )
    found = estimated_fixed(told, AWARE.spec, 4)
    assert found.at_ms == 12_000
    assert found.how == "estimated: 4 rounds of 3.0 s, as the first 2 here"
    assert estimated_fixed(history(), AWARE.spec, 4).at_ms is None


def test_sync_is_extrapolated_from_the_steps_that_were_taken() -> None:
    found = extrapolated_sync([round_point(1, 4000), round_point(2, 6000)], 50)
    assert found.at_ms == 250_000
    assert found.how == "extrapolated: 50 steps of 5.0 s, mean of 2 here"
    assert extrapolated_sync([], 50).at_ms is None


def test_the_table_has_each_in_multiples_of_the_first() -> None:
    race = Race(
        (Runner("aware", Milliseconds(5000), "m"), Runner("sync", Milliseconds(250_000), "e"))
    )
    assert race.sync_ratio == 50
    assert rows(race) == [("aware", "5.0 s", "1x", "m"), ("sync", "4 min 10 s", "50x", "e")]
    assert {len(row) for row in rows(race)} == {len(COLUMNS)}


def test_without_a_time_there_is_no_multiple() -> None:
    race = Race((Runner("aware", None, "m"), Runner("sync", Milliseconds(250_000), "e")))
    assert race.sync_ratio is None
    assert rows(race)[0] == ("aware", "not reached", "-", "m")


class Trained:
    """Remembers what was to be trained."""

    def __init__(self) -> None:
        self.specs: list[JobSpec] = []

    def __call__(self, spec: JobSpec, title: str) -> History:
        assert spec.strategy in title
        self.specs.append(spec)
        return history(round_point(1, 5000), at_ms=9000)


def test_the_whole_demo_trains_diloco_to_the_target_and_a_few_steps_of_sync() -> None:
    train = Trained()
    race = raced(AWARE, history(), train, is_short=False)
    diloco, sync = train.specs
    assert (diloco.strategy, diloco.evaluation.target) == ("diloco", AWARE.target)
    assert (sync.strategy, sync.training.rounds, sync.codec.up) == ("sync", SYNC_ROUNDS, "fp32")
    assert [each.strategy for each in race.runners] == ["aware", "diloco", "sync"]
    assert [each.at_ms for each in race.runners] == [6000, 9000, 5000 * AWARE.sync_steps]


def test_the_short_demo_trains_one_step_of_sync_and_nothing_else() -> None:
    train = Trained()
    race = raced(AWARE, history(round_point(1, 2000)), train, is_short=True)
    assert [each.training.rounds for each in train.specs] == [SYNC_ROUNDS_SHORT]
    assert race.runners[1].at_ms == 2000 * AWARE.diloco_rounds


def test_a_demo_by_diloco_has_no_second_one() -> None:
    race = raced(FIXED, history(metric=0.95), Trained(), is_short=False)
    assert [each.strategy for each in race.runners] == ["diloco", "sync"]
