"""Notices a chain, or an RPC, whose newest block stays the same while something waits for one."""

from collections import deque
from collections.abc import Callable

from coordinator.core.settlement.patience import standstill
from coordinator.shell.chain.turns import Turn
from hypergpu.chain.moments import moment
from hypergpu.units import Milliseconds

_REMEMBERED = 64
"""Blocks: replicas that stand still at different ones take turns to answer."""


class HeadWatch:
    """Used by the pipeline's thread, after each turn of the pump."""

    def __init__(self, block_ms: int, now_ms: Callable[[], Milliseconds]) -> None:
        self._block_ms = block_ms
        self._now_ms = now_ms
        self._seen: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._since_ms = now_ms()

    def complaint(self, turn: Turn) -> str:
        """What is to be said of the newest block; empty: it moves, or nothing waits for another.

        A chain that makes blocks for transactions alone has its time from the first that waits.
        """
        is_new, is_awaited = turn.head.hash not in self._seen, turn.waiting or turn.mined
        if is_new:
            self._seen.append(turn.head.hash)
        if is_new or not is_awaited:
            self._since_ms = self._now_ms()
        still_ms = self._now_ms() - self._since_ms
        return standstill(turn.head.number, moment(turn.head.time_s), still_ms, self._block_ms)
