"""How often the API may be asked, by address and by key."""

from hypergpu.clock import monotonic_ms
from hypergpu.rates import Rate, RateLimiter
from hypergpu.units import Milliseconds
from hypergpu.user.serving.api_keys import ApiKeyView
from hypergpu.user.serving.openai_requests import ApiError

ADDRESS_RATE = Rate(burst=200, interval_ms=Milliseconds(50))
"""Requests of an address: 200 at once, then 1,200 a minute."""
GUESS_RATE = Rate(burst=20, interval_ms=Milliseconds(3_000))
"""Wrong keys of an address: 20 at once, then 20 a minute."""
_PEERS_MOST = 4_096
_MINUTE_MS = 60_000


class CallRates:
    """Counts requests in memory: an API that restarts has forgotten them."""

    def __init__(self) -> None:
        self._addresses = RateLimiter(ADDRESS_RATE, _PEERS_MOST)
        self._guesses = RateLimiter(GUESS_RATE, _PEERS_MOST)
        self._keys: dict[tuple[str, int], RateLimiter] = {}

    def admit_address(self, address: str) -> None:
        """Count a request of an address.

        Raises:
            ApiError: There were too many.
        """
        _take(self._addresses, address, "this address")

    def count_guess(self, address: str) -> None:
        """Count a wrong key of an address.

        Raises:
            ApiError: There were too many.
        """
        _take(self._guesses, address, "this address, with wrong keys")

    def admit_key(self, key: ApiKeyView) -> None:
        """Count a request of a key.

        Raises:
            ApiError: There were more than its owner allows a minute.
        """
        if key.calls_per_minute is None:
            return
        name = (key.id, key.calls_per_minute)
        if name not in self._keys:
            interval_ms = Milliseconds(-(-_MINUTE_MS // key.calls_per_minute))
            self._keys[name] = RateLimiter(Rate(key.calls_per_minute, interval_ms), 1)
        _take(self._keys[name], key.id, f"this key, which may ask {key.calls_per_minute} a minute")


def _take(limiter: RateLimiter, peer: str, of_whom: str) -> None:
    now_ms = monotonic_ms()
    if not limiter.take(peer, now_ms):
        wait_s = -(-limiter.wait_ms(peer, now_ms) // 1000)
        raise ApiError(
            f"too many requests of {of_whom}",
            fix=f"ask again in {wait_s} s",
            status=429,
            kind="rate_limit_error",
            code="rate_limit_exceeded",
        ).after(wait_s)
