"""Rows of a job's history: training figures keep their columns, whatever metrics are called."""

from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.client.history import EvaluationPoint, History, RoundPoint


def history(metric: str, others: dict[str, float]) -> History:
    """Two rounds, the second of which was evaluated."""
    rounds = tuple(
        RoundPoint(number=number, duration_ms=Milliseconds(5), samples=Samples(640), loss=loss)
        for number, loss in ((1, 0.75), (2, 0.5))
    )
    point = EvaluationPoint(
        round=2,
        at_ms=Milliseconds(0),
        loss=9.0,
        metric=8.0,
        metrics=others,
        samples=Samples(0),
        bytes_up=Bytes(0),
        bytes_down=Bytes(0),
    )
    return History(rounds=rounds, evaluations=(point,), metric_name=metric)


def test_the_held_out_loss_does_not_hide_the_training_loss() -> None:
    rows = history("loss", {}).rows()
    assert [row["loss"] for row in rows] == [0.75, 0.5]
    assert [row["held_out_loss"] for row in rows] == [None, 9.0]
    columns = list(history("loss", {}).frame().columns)
    assert len(columns) == len(set(columns))


def test_a_metric_called_like_a_column_has_a_name_of_its_own() -> None:
    rows = history("samples", {"updates": 4.0, "f1": 0.25}).rows()
    assert [row["samples"] for row in rows] == [640, 640]
    assert (rows[1]["held_out_samples"], rows[1]["held_out_updates"], rows[1]["f1"]) == (
        8.0,
        4.0,
        0.25,
    )
    assert rows[0]["f1"] is None
