"""How often peers may do something: token buckets, and the slowing of those who guess secrets.
Only failures count as guesses.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.streams import monotonic_ms
from hypergpu.units import Milliseconds


class Rate(msgspec.Struct, frozen=True):
    """``burst`` at once, then one each ``interval_ms``."""

    burst: int
    interval_ms: Milliseconds


class RateLimiter:
    """Token buckets of peers, in bounded memory: the peers that took longest ago are forgotten."""

    def __init__(self, rate: Rate, peers_max: int = 65_536) -> None:
        self._rate = rate
        self._peers_max = peers_max
        self._full_at_ms: OrderedDict[Hashable, int] = OrderedDict()
        """When each peer's bucket is full again."""

    def take(self, peer: Hashable, now_ms: Milliseconds) -> bool:
        """Take one from the peer's bucket; False when it is empty."""
        if self.wait_ms(peer, now_ms):
            return False
        full_at_ms = max(self._full_at_ms.pop(peer, 0), now_ms) + self._rate.interval_ms
        self._full_at_ms[peer] = full_at_ms
        while len(self._full_at_ms) > self._peers_max:
            self._full_at_ms.popitem(last=False)
        return True

    def wait_ms(self, peer: Hashable, now_ms: Milliseconds) -> Milliseconds:
        """How long until the peer may take one again; 0 is now."""
        spare_ms = (self._rate.burst - 1) * self._rate.interval_ms
        return Milliseconds(max(0, self._full_at_ms.get(peer, 0) - spare_ms - now_ms))

    def forget(self, peer: Hashable) -> None:
        """Give the peer a full bucket again."""
        self._full_at_ms.pop(peer, None)


GUESSES = Rate(burst=10, interval_ms=Milliseconds(6_000))
"""Wrong secrets per peer: 10 at once, then 10 a minute."""
MAX_PEERS = 4096


class GuessLimiter:
    """Counts wrong secrets by peer, which is an address without its port."""

    def __init__(self) -> None:
        self._failures = RateLimiter(GUESSES, MAX_PEERS)

    @contextmanager
    def count_failures(self, peer: str, wrong: Collection[Reason]) -> Iterator[None]:
        """Judge a peer's secret within the block, unless the peer was wrong too often before.

        Args:
            peer: The caller.
            wrong: Errors of the block that count as a guess; they pass through like all others.

        Raises:
            HyperGPUError: RATE_LIMITED, with how long to wait; the block is not entered.
        """
        self.check(peer, monotonic_ms())
        try:
            yield
        except HyperGPUError as error:
            if error.reason in wrong:
                self.count(peer, monotonic_ms())
            raise

    def check(self, peer: str, now_ms: Milliseconds) -> None:
        """Reject a peer that was wrong too often, before its secret is looked at.

        Raises:
            HyperGPUError: RATE_LIMITED, with how long to wait.
        """
        if left_ms := self._failures.wait_ms(peer, now_ms):
            raise HyperGPUError(
                Reason.RATE_LIMITED, f"too many wrong secrets from {peer}: wait {left_ms} ms"
            )

    def count(self, peer: str, now_ms: Milliseconds) -> None:
        """Count a wrong secret."""
        self._failures.take(peer, now_ms)
