"""A job's course as its journal tells it: rounds, evaluations, when a target was reached. Pure.

Time is the journal's and counts from when the first round was opened, so that a watcher who looks
late or seldom tells the same.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.journal.events import (
    AggregateReadyEvent,
    EvaluationReadyEvent,
    RoundMeasuredEvent,
    RoundRecordedEvent,
    RoundWeights,
)
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.client.values import JobEvent
from hypergpu.workloads.metrics import direction, has_reached


class RoundPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One closed round."""

    number: int
    """Counts from 1."""
    duration_ms: Milliseconds
    ended_ms: Milliseconds = Milliseconds(0)
    """Since the first round was opened."""
    participants: int = 0
    """Nodes that the round's plan gave work."""
    updates: int = 0
    samples: Samples = Samples(0)
    """Samples of the updates that were aggregated; like all counts here, of this round alone."""
    bytes_up: Bytes = Bytes(0)
    bytes_down: Bytes | None = Bytes(0)
    """None: not measured, in virtual time."""
    loss: float | None = None
    """Mean training loss of the round's updates; None: not told, or no number."""
    inner_steps: int = 0
    """Median number of inner steps that participants were assigned; 0: not told."""
    codecs: dict[str, int] = {}
    """How many participants were to send in which codec."""
    forecast_error: float | None = None
    """Error of the forecast finishes relative to the real ones; None: nothing was forecast."""


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The model after some rounds, judged on the held-out set."""

    round: int
    """How many rounds made the model."""
    at_ms: Milliseconds
    """When the model was there; judging it takes the coordinator's time, not the training's."""
    loss: float | None = None
    metric: float | None = None
    """None: it was no number, as after a training that diverged."""
    metrics: dict[str, float] = {}
    """Further metrics by name."""
    samples: Samples
    """All until then, as the bytes are."""
    bytes_up: Bytes
    bytes_down: Bytes


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """What it took to reach a target: on the line between the evaluations before and after."""

    at_ms: Milliseconds
    rounds: int
    """Number of rounds that were open or closed by then."""
    samples: Samples
    bytes_up: Bytes
    bytes_down: Bytes


class History(msgspec.Struct, frozen=True):
    """Rounds and evaluations so far."""

    began_at_ms: int | None = None
    """Journal's time at which the first round was opened."""
    rounds: tuple[RoundPoint, ...] = ()
    evaluations: tuple[EvaluationPoint, ...] = ()
    metric_name: str = ""

    def rows(self) -> list[dict[str, object]]:
        """A row for each closed round, with what its model was found to be on held-out data:
        ``held_out_loss`` and the metrics by their names, None where that was not evaluated. A
        metric called like a column is ``held_out_NAME`` here; ``loss`` is ``held_out_loss``.
        """
        columns = self._metric_columns()
        evaluations = {point.round: point for point in self.evaluations}
        rows: list[dict[str, object]] = []
        for each in self.rounds:
            row: dict[str, object] = {"round": each.number, **msgspec.structs.asdict(each)}
            del row["number"]
            point = evaluations.get(each.number)
            row["held_out_loss"] = point.loss if point else None
            for name, column in columns.items():
                row[column] = self._metric_of(point, name) if point else None
            rows.append(row)
        return rows

    def _metric_columns(self) -> dict[str, str]:
        """Columns of the metrics by their names, the first metric's first."""
        others = (name for each in self.evaluations for name in each.metrics)
        names = dict.fromkeys([self.metric_name or "metric", *others])
        own = {"round", "held_out_loss", *RoundPoint.__struct_fields__}
        return {
            name: f"held_out_{name}" if name in own else name for name in names if name != "loss"
        }

    def _metric_of(self, point: EvaluationPoint, name: str) -> float | None:
        is_first = name == (self.metric_name or "metric")
        return point.metric if is_first else point.metrics.get(name)

    def frame(self) -> Any:
        """The rows as a `pandas.DataFrame`, indexed by ``round``.

        Raises:
            HyperGPUError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError:
            detail, fix = "a table needs pandas, which is not installed", "pip install pandas"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix) from None
        columns = ["round", *RoundPoint.__struct_fields__[1:], "held_out_loss"]
        columns += self._metric_columns().values()
        return pd.DataFrame(self.rows(), columns=columns).set_index("round")


_WHOLE = 65_536


class TrustPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one round found of a node's update."""

    round: int
    """Counts from 0, as in the journal."""
    weight: int | None
    """Weight of the node after the round, in 1/65,536 of a whole one; None: none was learned."""
    honesty: int | None = None
    """What samples of its own shards taught of the node, in 1/65,536; None: nothing yet."""
    vote: int = _WHOLE
    """Share of a vote that the update had in the fold, in 1/65,536."""
    quality_bps: int
    reason: str


class TrustHistory(msgspec.Struct, frozen=True):
    """All rounds of a job in which an update of a node was measured."""

    node: str
    rounds: tuple[TrustPoint, ...]


def trust_history(events: Iterable[JobEvent], node: str) -> TrustHistory:
    """Collect what a job's rounds found of a node."""
    points: list[TrustPoint] = []
    weight: int | None = None
    honesty: int | None = None
    vote = _WHOLE
    for event in events:
        match event.content:
            case AggregateReadyEvent(weighing=RoundWeights(memory=memory) as weighing):
                weight = memory.weights.get(node, weight)
                honesty = memory.honesty.get(node, honesty)
                vote = weighing.votes.get(node, _WHOLE)
            case RoundMeasuredEvent() as measurement:
                points += [
                    TrustPoint(
                        round=measurement.round,
                        weight=weight,
                        honesty=honesty,
                        vote=vote,
                        quality_bps=each.quality_bps,
                        reason=each.reason,
                    )
                    for each in measurement.updates
                    if each.node == node
                ]
            case _:
                pass
    return TrustHistory(node, tuple(points))


def with_event_recorded(history: History, event: JobEvent) -> History:
    """Add one event to the history."""
    match event.content:
        case RoundRecordedEvent() as round_record:
            return _with_round(history, round_record, event.at_ms)
        case EvaluationReadyEvent() as evaluation:
            return _with_evaluation(history, evaluation)
        case _:
            return history


def target_reached_at(
    points: Sequence[EvaluationPoint], target: float, name: str
) -> Reached | None:
    """When the metric called ``name`` first was at the target or beyond; None when it never was.

    Between the last evaluation below and the first at the target everything is taken to have grown
    evenly. A target that the first evaluation has reached counts from there.
    """
    before: EvaluationPoint | None = None
    for point in points:
        if point.metric is None:
            continue
        if has_reached(target, point.metric, name=name, mode=direction(name)):
            return _between(before, point, target)
        before = point
    return None


def _between(before: EvaluationPoint | None, after: EvaluationPoint, target: float) -> Reached:
    share = 1.0
    if before is not None and before.metric is not None and after.metric is not None:
        share = (target - before.metric) / (after.metric - before.metric)

    def level(name: str) -> float:
        least = getattr(before, name) if before else 0
        return float(least + (getattr(after, name) - least) * share)

    return Reached(
        at_ms=Milliseconds(round(level("at_ms"))),
        rounds=math.ceil(level("round") - 1e-9),
        samples=Samples(round(level("samples"))),
        bytes_up=Bytes(round(level("bytes_up"))),
        bytes_down=Bytes(round(level("bytes_down"))),
    )


def _with_round(history: History, event: RoundRecordedEvent, at_ms: int) -> History:
    began_at_ms = history.began_at_ms
    if began_at_ms is None:
        began_at_ms = at_ms - event.duration_ms
    point = RoundPoint(
        number=event.round + 1,
        duration_ms=event.duration_ms,
        ended_ms=Milliseconds(at_ms - began_at_ms),
        participants=event.participants,
        updates=event.updates,
        samples=event.samples,
        bytes_up=event.bytes_up,
        bytes_down=event.bytes_down,
        loss=event.loss,
        inner_steps=event.inner_steps,
        codecs=dict(event.codecs),
        forecast_error=event.forecast_error,
    )
    return msgspec.structs.replace(
        history, began_at_ms=began_at_ms, rounds=(*history.rounds, point)
    )


def _with_evaluation(history: History, event: EvaluationReadyEvent) -> History:
    # The model of round n is what n closed rounds made; others may have closed meanwhile.
    made_it = [each for each in history.rounds if each.number <= event.round]
    point = EvaluationPoint(
        round=event.round,
        at_ms=made_it[-1].ended_ms if made_it else Milliseconds(0),
        loss=event.loss,
        metric=event.metric,
        metrics=event.further_metrics,
        samples=Samples(sum(each.samples for each in made_it)),
        bytes_up=Bytes(sum(each.bytes_up for each in made_it)),
        bytes_down=Bytes(sum(each.bytes_down or 0 for each in made_it)),
    )
    return msgspec.structs.replace(
        history,
        evaluations=(*history.evaluations, point),
        metric_name=event.metric_name or history.metric_name,
    )


def metric_after(history: History, number: int) -> float | None:
    """Metric of the model that so many rounds made, if it was evaluated."""
    metrics = (each.metric for each in reversed(history.evaluations) if each.round == number)
    return next(metrics, None)
