"""The rows and metrics that one backend adds to the fidelity table."""

from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from hypergpu.units import Microseconds
from netsim.link import CongestionControl, Link, LinkDirection

MBIT = 1_000_000
TRIES = 3
Found = TypeVar("Found")
Row = tuple[str, str, str, str]
"""Figure, configured, measured, error."""


class Measurement(NamedTuple, Generic[Found]):
    """A measured value, and whether the backend kept its times meanwhile."""

    found: Found
    is_valid: bool


class BackendFigures:
    """Rows for people and metrics for checks. A row that does not count says so."""

    def __init__(self, backend: str, *notes: str) -> None:
        self.rows: list[Row] = []
        self.metrics: dict[str, float] = {}
        self.repeats = 0
        self._backend = backend
        self._notes = notes
        self._invalid: list[str] = []

    async def measure(
        self, measure: Callable[[], Awaitable[Measurement[Found]]]
    ) -> Measurement[Found]:
        """Measure until the result is valid, three times at most."""
        for _ in range(TRIES - 1):
            measurement = await measure()
            if measurement.is_valid:
                return measurement
            self.repeats += 1
        return await measure()

    def add(
        self, name: str, configured: float, measured: float, error: str, *, valid: bool
    ) -> None:
        """Add a row."""
        name = f"{self._backend}: {name}"
        if not valid:
            self._invalid.append(name)
            name = f"{name} (INVALID)"
        self.rows.append((name, f"{configured:.4g}", f"{measured:.4g}", error))

    def finish(self) -> None:
        """Count the invalid rows among the metrics."""
        self.metrics[f"{self._backend}_invalid_rows"] = float(len(self._invalid))

    def notes(self) -> list[str]:
        """Return the notes for the reader of the table."""
        notes = list(self._notes)
        if self.repeats:
            notes.append(f"The {self._backend} was late: measured again {self.repeats} times.")
        if self._invalid:
            notes.append(f"Still late or too slow; these do not count: {', '.join(self._invalid)}")
        return notes


def symmetric_link(
    delay_ms: float = 0,
    mbit_s: float = 0,
    control: CongestionControl = CongestionControl.CUBIC,
    *,
    loss: float = 0,
    burst: float = 1,
) -> Link:
    """Return a link that is the same both ways."""
    way = LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * MBIT),
        loss=loss,
        burst_packets=burst,
    )
    return Link(up=way, down=way, congestion_control=control)
