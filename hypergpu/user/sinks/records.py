"""Figures of a job as sinks get them: a fold of its journal. Pure."""

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from hypergpu.journal.events import (
    EvaluationReadyEvent,
    RoundMeasuredEvent,
    RoundRecordedEvent,
)
from hypergpu.journal.worth import cost
from hypergpu.user.client.values import JobDetail, JobEvent

_ROUND_VALUES = (
    *("loss", "samples", "participants", "updates", "bytes_up", "bytes_down", "duration_ms"),
)


class SinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that one event of a journal tells."""

    kind: str
    """``round``, ``evaluation`` or ``pay``."""
    round: int
    """Rounds that were closed when the figures were true; counts from 1."""
    sequence: int
    """Number of the event; it grows from record to record, and is the same for every watcher."""
    at_ms: int
    """Journal's time, which counts from the job's creation."""
    values: dict[str, float]
    """By name, such as ``loss``; what is no number is left out."""

    def named_values(self) -> dict[str, float]:
        """Values under ``kind/name``, such as ``round/loss`` and ``evaluation/loss``."""
        return {f"{self.kind}/{name}": value for name, value in self.values.items()}


class JobFigures:
    """Reads a journal from its first event on."""

    def __init__(self, job: JobDetail) -> None:
        pay = job.spec.get("pay")
        price = pay.get("unit_price") if isinstance(pay, dict) else 0
        self._unit_price = int(price or 0)
        self._scores = Counter[str]()

    def read(self, event: JobEvent) -> SinkRecord | None:
        """Figures of the next event; None where it has none."""
        match event.content:
            case RoundRecordedEvent() as round_record:
                figures = {name: getattr(round_record, name) for name in _ROUND_VALUES}
                return _record("round", event, round_record.round + 1, figures)
            case EvaluationReadyEvent() as evaluation:
                name = evaluation.metric_name or "metric"
                metrics = {**evaluation.metrics, name: evaluation.metric, "loss": evaluation.loss}
                return _record("evaluation", event, evaluation.round, metrics)
            case RoundMeasuredEvent() as measurement if self._unit_price:
                values = {"spent": self._add_cost(measurement)}
                return _record("pay", event, measurement.round + 1, values)
            case _:
                return None

    def _add_cost(self, event: RoundMeasuredEvent) -> int:
        """Worth of all accepted work so far, in the token's smallest unit."""
        for work in event.updates:
            self._scores[work.node] += work.score
        return cost(self._unit_price, self._scores.values())


def _record(
    kind: str, event: JobEvent, rounds: int, figures: Mapping[str, float | None]
) -> SinkRecord:
    values = {
        name: float(value)
        for name, value in figures.items()
        if value is not None and math.isfinite(value)
    }
    return SinkRecord(
        kind=kind, round=rounds, sequence=event.sequence, at_ms=event.at_ms, values=values
    )
