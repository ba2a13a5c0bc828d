"""A job's course out of its events, and when it reached a target."""

import pytest

from hypergpu.client.history import EvaluationPoint, History, target_reached_at, with_event_recorded
from hypergpu.client.values import JobEvent
from hypergpu.units import Bytes, Milliseconds, Samples

BEGAN_AT_MS = 700_000


def round_event(number: int, at_ms: int, duration_ms: int) -> JobEvent:
    body: dict[str, object] = {
        "round": number,
        "participants": 2,
        "updates": 2,
        "samples": 100,
        "bytes_up": 10,
        "bytes_down": 30,
        "duration_ms": duration_ms,
    }
    return JobEvent(number, BEGAN_AT_MS + at_ms, "RoundRecorded", body)


def evaluation_event(number: int, at_ms: int, metric: float | None) -> JobEvent:
    body: dict[str, object] = {
        "round": number,
        "loss": 0.5,
        "metric": metric,
        "metric_name": "accuracy",
    }
    return JobEvent(0, BEGAN_AT_MS + at_ms, "EvaluationReady", body)


def history_of(*events: JobEvent) -> History:
    history = History()
    for event in events:
        history = with_event_recorded(history, event)
    return history


def point(number: int, metric: float | None) -> EvaluationPoint:
    return EvaluationPoint(
        round=number,
        at_ms=Milliseconds(1000 * number),
        loss=None,
        metric=metric,
        samples=Samples(100 * number),
        bytes_up=Bytes(10 * number),
        bytes_down=Bytes(20 * number),
    )


def test_time_counts_from_when_the_first_round_was_opened() -> None:
    history = history_of(round_event(0, 2000, 2000), round_event(1, 3500, 1500))
    assert [each.ended_ms for each in history.rounds] == [2000, 3500]
    assert [each.number for each in history.rounds] == [1, 2]


def test_a_round_tells_what_was_planned_for_it_and_how_far_the_forecast_was_off() -> None:
    bare = round_event(0, 2000, 2000)
    planned = {"inner_steps": 40, "codecs": {"int4": 3, "topk64": 1}, "forecast_error": 0.125}
    (found,) = history_of(JobEvent(0, bare.at_ms, bare.kind, {**bare.body, **planned})).rounds
    assert (found.inner_steps, found.codecs) == (40, {"int4": 3, "topk64": 1})
    assert found.forecast_error == 0.125
    (unplanned,) = history_of(bare).rounds
    assert (unplanned.codecs, unplanned.forecast_error) == ({}, None)


def test_evaluation_stands_where_its_model_was_made_however_long_judging_took() -> None:
    history = history_of(
        round_event(0, 2000, 2000), round_event(1, 3500, 1500), evaluation_event(1, 3600, 0.5)
    )
    (found,) = history.evaluations
    assert (found.at_ms, found.samples, found.bytes_up, found.bytes_down) == (2000, 100, 10, 30)
    assert history.metric_name == "accuracy"


def test_a_metric_that_is_no_number_is_no_metric() -> None:
    (found,) = history_of(round_event(0, 10, 10), evaluation_event(1, 20, None)).evaluations
    assert found.metric is None


def test_target_is_reached_between_two_evaluations() -> None:
    there = target_reached_at([point(2, 0.5), point(4, 0.9)], 0.6, "accuracy")
    assert there is not None
    assert (there.at_ms, there.samples, there.bytes_up, there.bytes_down) == (2500, 250, 25, 50)
    assert there.rounds == 3


def test_the_first_time_counts_even_when_it_is_lost_again() -> None:
    there = target_reached_at(
        [point(1, 0.5), point(2, 0.7), point(3, 0.4), point(4, 0.9)], 0.7, "accuracy"
    )
    assert there is not None
    assert there.at_ms == 2000


def test_a_perplexity_is_reached_from_above() -> None:
    there = target_reached_at([point(1, 100.0), point(3, 60.0)], 80.0, "perplexity")
    assert there is not None
    assert there.at_ms == 2000


def test_what_diverged_between_is_passed_over() -> None:
    there = target_reached_at([point(1, 0.5), point(2, None), point(3, 0.9)], 0.7, "accuracy")
    assert there is not None
    assert there.at_ms == 2000


@pytest.mark.parametrize("target", [0.95, 0.0])
def test_a_target_that_was_missed_or_not_set_is_never_reached(target: float) -> None:
    assert target_reached_at([point(1, 0.5), point(2, 0.9)], target, "accuracy") is None
