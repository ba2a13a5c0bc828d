"""Figures of a job as sinks get them: a fold of its journal. Pure."""

import math

import msgspec

from hypergpu.client.history import update_qualities
from hypergpu.client.values import JobDetail, JobEvent

_PRICED_SCORE = 1_000_000
"""Samples times quality in basis points that the unit price of a job pays for."""
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
        self._scores: dict[str, int] = {}

    def read(self, event: JobEvent) -> SinkRecord | None:
        """Figures of the next event; None where it has none."""
        if event.kind == "RoundRecorded":
            given = {name: event.body.get(name) for name in _ROUND_VALUES}
            return _record("round", event, given, rounds_after=1)
        if event.kind == "EvaluationReady":
            name = str(event.body.get("metric_name") or "metric")
            more = event.body.get("metrics")
            given = {**(more if isinstance(more, dict) else {}), name: event.body.get("metric")}
            return _record("evaluation", event, {**given, "loss": event.body.get("loss")})
        if event.kind == "RoundMeasured" and self._unit_price:
            return _record("pay", event, {"spent": self._add_spent(event)}, rounds_after=1)
        return None

    def _add_spent(self, event: JobEvent) -> int:
        """Worth of all accepted work, in the token's smallest unit; rounded down by node."""
        for each in update_qualities(event):
            score = each.samples * each.quality_bps
            self._scores[each.node] = self._scores.get(each.node, 0) + score
        return sum(self._unit_price * score // _PRICED_SCORE for score in self._scores.values())


def _record(
    kind: str, event: JobEvent, given: dict[str, object], rounds_after: int = 0
) -> SinkRecord:
    number = event.body.get("round")
    values = {
        name: float(value)
        for name, value in given.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return SinkRecord(
        kind=kind,
        round=(number if isinstance(number, int) else 0) + rounds_after,
        sequence=event.sequence,
        at_ms=event.at_ms,
        values=values,
    )
