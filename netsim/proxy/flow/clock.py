"""The clock of links and streams."""

from collections.abc import Callable
from typing import Protocol

from hypergpu.units import Microseconds

Deed = Callable[[], None]


class FlowClock(Protocol):
    """Deeds are done in the order of their moments, and see their own moment as the present."""

    now_us: Microseconds
    """Since the clock was made."""

    def at(self, due_us: int, deed: Deed) -> None:
        """Plan a deed; one in the past is done at once, after those before it."""
