"""Slows down who guesses secrets: per peer, and for all peers together, in bounded memory."""

import threading
from collections import OrderedDict

from coordinator.shell.identity.rate import GUESSES, Bucket, Rate, take_token, wait_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Milliseconds

MAX_PEERS = 4096


class GuessLimiter:
    """Wrong secrets by peer. Only failures count, so that honest callers are never slowed."""

    def __init__(self, rate: Rate = GUESSES) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def check(self, peer: str, now_ms: Milliseconds) -> None:
        """Refuse a peer that was wrong too often, before its secret is looked at.

        Args:
            peer: An address without its port.
            now_ms: Monotonic.

        Raises:
            HyperGPUError: RATE_LIMITED, with how long to wait.
        """
        with self._lock:
            bucket = self._buckets.get(peer, Bucket())
        if left_ms := wait_ms(self._rate, bucket, now_ms):
            raise HyperGPUError(
                Reason.RATE_LIMITED, f"too many wrong secrets from {peer}: wait {left_ms} ms"
            )

    def failed(self, peer: str, now_ms: Milliseconds) -> None:
        """Count a wrong secret."""
        with self._lock:
            bucket = self._buckets.pop(peer, Bucket())
            self._buckets[peer] = take_token(self._rate, bucket, now_ms) or bucket
            while len(self._buckets) > MAX_PEERS:
                self._buckets.popitem(last=False)
