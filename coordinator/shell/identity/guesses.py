"""Slows down peers that guess secrets. Only failures count: honest callers are never slowed."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from coordinator.shell.identity.rate import Rate, RateLimiter
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.process.clock import monotonic_ms
from hypergpu.units import Milliseconds

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
