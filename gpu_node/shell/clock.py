"""Time: one clock for durations, which never goes back, and one for what outlives the process."""

import time

from hypergpu.units import Milliseconds


def monotonic_ms() -> Milliseconds:
    """Milliseconds since an arbitrary instant."""
    return Milliseconds(time.monotonic_ns() // 1_000_000)


def unix_ms() -> Milliseconds:
    """Milliseconds since 1970 as this machine believes. It may be wrong and may jump."""
    return Milliseconds(time.time_ns() // 1_000_000)
