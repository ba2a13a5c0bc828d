"""Items that take a least time each, and how their rate over netsim's lines is told."""

import msgspec

WARM_UP_ITEMS = 20
"""Done by each node before the clock starts, so that libraries are loaded."""


class LineRate(msgspec.Struct, frozen=True):
    """What a script that had items done over lines says in its last line."""

    items_per_s: float


class RayRates(msgspec.Struct, frozen=True, tag=True):
    """Ray's rates, by how items become tasks."""

    bundles: float
    """Items a second where a task has 50."""
    singles: float
    """Items a second where a task has one."""


class RayBlocked(msgspec.Struct, frozen=True, tag=True):
    """Ray did not start over the lines, or did not end its tasks in time."""

    reason: str
    """With the last words of its own processes."""


RayOutcome = RayRates | RayBlocked
"""What Ray's script says in its last line."""


def line_texts(items: int, first: int = 0) -> list[str]:
    """Texts of about 100 bytes, the same each time."""
    return [f"text {first + place:07d} " + 11 * "of words " for place in range(items)]
