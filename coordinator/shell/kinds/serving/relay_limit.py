"""How much of this machine's line the hidden states of all rings may take together."""

from hypergpu.units import Milliseconds

WAIT_MS_MOST = Milliseconds(5_000)
"""Where states wait for longer, rings take no further calls."""


class RelayLimit:
    """Spreads bytes that stages send each other over time, in the order in which they come.

    They go in and out once each, so that the share holds of either direction. Heartbeats, updates
    and everything else do not ask here: they have the rest of the line, and what of the share is
    not used.

    Args:
        line_mbit_s: Rate of this machine's line; 0: not known, and nothing waits.
        percent: Share of it, 1 to 100.
    """

    def __init__(self, line_mbit_s: int = 0, percent: int = 100) -> None:
        self._line_mbit_s = line_mbit_s
        self._percent = percent
        self._bits_per_ms = line_mbit_s * percent * 10
        self._free_at_ms = 0.0

    def reserve_ms(self, size_bytes: int, now_ms: int) -> Milliseconds:
        """Take so many bytes; gives the time until they may go."""
        if not self._bits_per_ms or not size_bytes:
            return Milliseconds(0)
        begin_ms = max(self._free_at_ms, float(now_ms))
        self._free_at_ms = begin_ms + 8 * size_bytes / self._bits_per_ms
        return Milliseconds(round(begin_ms - now_ms))

    def refusal(self, now_ms: int) -> str:
        """Why a ring takes no further call now; empty: it does."""
        waiting_ms = self._free_at_ms - now_ms
        if waiting_ms <= WAIT_MS_MOST:
            return ""
        rate = self._line_mbit_s * self._percent / 100
        return (
            f"hidden states of rings have {self._percent} % of the coordinator's line,"
            f" {rate:g} Mbit/s, and {waiting_ms / 1000:.0f} s of them wait."
            " Fix: ask later; serve with --codec int8o; or raise relay_percent or line_mbit_s there"
        )
