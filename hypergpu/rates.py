"""How often peers may do something: token buckets in bounded memory."""

from collections import OrderedDict
from collections.abc import Hashable

import msgspec

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
