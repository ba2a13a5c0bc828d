"""Clocks of this machine. A job's own time is counted by the coordinator, since these may jump."""

import time

from hypergpu.units import Microseconds, Milliseconds


def monotonic_ms() -> Milliseconds:
    """Milliseconds since an arbitrary instant; never goes back while the process lives."""
    return Milliseconds(time.monotonic_ns() // 1_000_000)


def monotonic_us() -> Microseconds:
    """Microseconds since the same instant."""
    return Microseconds(time.monotonic_ns() // 1_000)


def unix_ms() -> Milliseconds:
    """Milliseconds since 1970 as this machine believes. The clock may be wrong and may jump."""
    return Milliseconds(time.time_ns() // 1_000_000)


def unix_s() -> int:
    """Seconds since 1970: for certificates and tokens only, never for jobs."""
    return int(time.time())
