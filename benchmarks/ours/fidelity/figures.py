"""What one backend brings to the fidelity table."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

Row = tuple[str, str, str, str]
"""What, asked, measured, error."""
TRIES = 3
Found = TypeVar("Found")


class Judged(NamedTuple, Generic[Found]):
    """What was found, and whether the backend kept its times meanwhile."""

    found: Found
    is_valid: bool


class Repeats:
    """Measures again what a backend itself calls INVALID, three times at most, and counts that."""

    def __init__(self) -> None:
        self.again = 0
        self.invalid: list[str] = []

    async def measured(self, measure: Callable[[], Awaitable[Judged[Found]]]) -> Judged[Found]:
        """Measure until it counts, or for the last time."""
        for _ in range(TRIES - 1):
            measured = await measure()
            if measured.is_valid:
                return measured
            self.again += 1
        return await measure()

    def judged(self, row: Row, *, is_valid: bool) -> Row:
        """The row; one that does not count says so."""
        if is_valid:
            return row
        self.invalid.append(row[0])
        return (f"{row[0]} (INVALID)", *row[1:])

    def notes(self) -> list[str]:
        """For the reader."""
        notes = []
        if self.again:
            notes.append(f"The backend was late: measured again {self.again} times.")
        if self.invalid:
            notes.append(f"Still late or too slow; these do not count: {', '.join(self.invalid)}")
        return notes


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rows for people, metrics for whoever checks."""

    rows: Sequence[Row]
    metrics: Mapping[str, float]
    notes: Sequence[str] = ()
