"""What the coordinator's own work for jobs takes, as it was timed."""

from collections import deque
from statistics import median

from coordinator.core.training.job_forecast.basis import CoordinatorTimes
from hypergpu.units import Bytes, Milliseconds

_KEPT = 64
_SIZE_TIMES = 4
"""Work on models that are no more than so many times larger or smaller says something."""
_FOLDED_BYTES_PER_MS = 100_000
"""What a fold and its files are assumed to do."""
_FIELDS = {
    "initialise": "prepare_ms",
    "plan": "plan_ms",
    "aggregate": "aggregate_ms",
    "evaluate": "evaluate_ms",
}


class CommandTimes:
    """Times of commands, by the size of the job's model."""

    def __init__(self) -> None:
        self._times: dict[str, deque[tuple[Bytes, Milliseconds]]] = {
            kind: deque(maxlen=_KEPT) for kind in _FIELDS
        }

    def note(self, kind: str, model_bytes: Bytes, took_ms: Milliseconds) -> None:
        """A command was carried out; those that jobs do not wait for are passed over."""
        if kind in self._times:
            self._times[kind].append((model_bytes, took_ms))

    def times_for(self, model_bytes: Bytes) -> CoordinatorTimes:
        """What commands take for a model of that size, or are assumed to."""
        usual_times = CoordinatorTimes()
        folding_ms = usual_times.aggregate_ms + model_bytes // _FOLDED_BYTES_PER_MS
        field_times_ms = {"aggregate_ms": folding_ms}
        for kind, field in _FIELDS.items():
            known_times_ms = [
                took_ms
                for size, took_ms in self._times[kind]
                if size <= _SIZE_TIMES * model_bytes and model_bytes <= _SIZE_TIMES * size
            ]
            if known_times_ms:
                field_times_ms[field] = round(median(known_times_ms))
        return CoordinatorTimes(
            **{
                field: Milliseconds(field_times_ms.get(field, getattr(usual_times, field)))
                for field in _FIELDS.values()
            }
        )
