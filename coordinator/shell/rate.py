"""How much peers may do at a time: rates of the coordinator, counts of what is open, and wrong
secrets by the token they were shown for.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.rates import Rate, RateLimiter
from hypergpu.units import Milliseconds

NODE_CALLS = Rate(burst=1_000, interval_ms=Milliseconds(5))
"""All calls of one node: many times those of the shortest rounds."""


GUESSES = Rate(burst=10, interval_ms=Milliseconds(6_000))
"""Wrong secrets per token: 10 at once, then 10 a minute."""
MAX_TOKENS = 4096


class GuessLimiter:
    """Counts wrong secrets by the token that they were shown for.

    A right secret always passes: whoever knows a token's id, or shares its holder's address, locks
    nobody out. Secrets have 256 random bits, so that no rate of guessing finds one; whoever keeps
    guessing costs one hash a call and is told to wait.
    """

    def __init__(self) -> None:
        self._failures = RateLimiter(GUESSES, MAX_TOKENS)

    @contextmanager
    def count_failures(self, wrong: Mapping[Reason, str]) -> Iterator[None]:
        """Judge a credential within the block.

        Args:
            wrong: Errors of the block that are counted, each by the token, or the token and the
                address, that it is counted for. All errors pass through.

        Raises:
            HyperGPUError: RATE_LIMITED in place of a counted error, with how long to wait.
        """
        try:
            yield
        except HyperGPUError as error:
            if error.reason in wrong:
                self.count(wrong[error.reason], monotonic_ms())
            raise

    def count(self, token_id: str, now_ms: Milliseconds) -> None:
        """Count a wrong secret.

        Raises:
            HyperGPUError: RATE_LIMITED.
        """
        if not self._failures.take(token_id, now_ms):
            left_ms = self._failures.wait_ms(token_id, now_ms)
            detail = f"too many wrong secrets for token {token_id[:80]!r}: wait {left_ms} ms"
            raise HyperGPUError(Reason.RATE_LIMITED, detail, wait_ms=left_ms)


LINES = Rate(burst=100, interval_ms=Milliseconds(1_000))
"""Log lines about one node, token or peer."""


class LineLimiter:
    """Processor of structlog that leaves out lines about a node, token or peer beyond their rate.
    The next line that is written says how many were left out. Errors are always written.
    """

    def __init__(self) -> None:
        self._lines = RateLimiter(LINES)
        self._left_out: Counter[Hashable] = Counter()

    def __call__(
        self, _logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Pass a line on, or drop it."""
        peer = event.get("node") or event.get("token_id") or event.get("peer")
        if peer is None or method in {"error", "exception", "critical"}:
            return event
        if not self._lines.take(peer, monotonic_ms()):
            self._left_out[peer] += 1
            raise structlog.DropEvent
        if left_out := self._left_out.pop(peer, 0):
            event["lines_left_out"] = left_out
        return event


class OpenCounter:
    """Counts what each peer holds open at a time, up to a limit."""

    def __init__(self, most: int, name: str) -> None:
        """Allow ``most`` at a time; ``name`` says of what, in the plural."""
        self._most = most
        self._name = name
        self._open: Counter[Hashable] = Counter()

    @contextmanager
    def hold(self, peer: Hashable) -> Iterator[None]:
        """Count one more within the block.

        Raises:
            HyperGPUError: LIMIT_REACHED.
        """
        if self._open[peer] >= self._most:
            detail = f"{peer} has {self._most} {self._name} open, which is the most"
            raise HyperGPUError(Reason.LIMIT_REACHED, detail)
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
