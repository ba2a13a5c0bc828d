"""Time. Job time is what passed while a coordinator ran: downtime is zero, wall clocks may jump."""

import time

from hypergpu.units import Microseconds, Milliseconds


def monotonic_ms() -> Milliseconds:
    """Milliseconds since an arbitrary instant; never goes back while the process lives."""
    return Milliseconds(time.monotonic_ns() // 1_000_000)


def monotonic_us() -> Microseconds:
    """The same instant, finer."""
    return Microseconds(time.monotonic_ns() // 1_000)


class JobClock:
    """One job's time: the last journalled time plus what passed since this process began."""

    def __init__(self, last_at_ms: Milliseconds) -> None:
        self._offset_ms = last_at_ms - monotonic_ms()

    def now_ms(self) -> Milliseconds:
        """Job time now."""
        return Milliseconds(self._offset_ms + monotonic_ms())


def unix_s() -> int:
    """Wall-clock seconds: for certificates and tokens only, never for jobs."""
    return int(time.time())
