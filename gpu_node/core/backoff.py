"""Waits before retries, drawn from a hash, so that a simulation repeats itself."""

import hashlib

from hypergpu.units import Milliseconds

FIRST_MS = 200
CAP_MS = Milliseconds(30_000)
QUICK_CAP_MS = Milliseconds(1_500)
"""The longest wait while a good link has only just broken: a link that is there again is to be in
use within two seconds, greeting included."""
QUICK_MS = 60_000
QUICK_ATTEMPT_MAX = 4
"""200 ms << 4 is over the quick cap; waits grow from there once the quick minute is over."""
_DOUBLINGS_MAX = 8  # 200 ms << 8 is over the cap


def backoff_ms(key: str, attempt: int, cap_ms: Milliseconds = CAP_MS) -> Milliseconds:
    """Wait before retry number ``attempt`` (0 is the first).

    The wait is in [0.5, 1) of ``200 ms * 2**attempt``, at most of ``cap_ms``. Where it falls is a
    hash of ``key`` and ``attempt``, so that a thousand nodes cut off together do not come back
    together and a simulation repeats itself.
    """
    whole_ms = min(cap_ms, FIRST_MS << min(attempt, _DOUBLINGS_MAX))
    half_ms = whole_ms // 2
    return Milliseconds(half_ms + chosen_ms(f"{key}/{attempt}", half_ms))


def chosen_ms(key: str, below_ms: int) -> Milliseconds:
    """A time in [0, ``below_ms``), the same for the same ``key``."""
    seed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return Milliseconds(int.from_bytes(seed, "big") % below_ms)
