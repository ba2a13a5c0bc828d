"""How often somebody may be wrong: a token bucket per peer, with the time as an argument."""

import msgspec

from hypergpu.units import Milliseconds


class Rate(msgspec.Struct, frozen=True):
    """``burst`` at once, then one each ``interval_ms``."""

    burst: int
    interval_ms: Milliseconds


class Bucket(msgspec.Struct, frozen=True):
    """When the bucket is full again. In the past: it is full."""

    full_at_ms: Milliseconds = Milliseconds(0)


GUESSES = Rate(burst=10, interval_ms=Milliseconds(6_000))
"""Wrong secrets per peer: 10 at once, then 10 a minute."""


def take_token(rate: Rate, bucket: Bucket, now_ms: Milliseconds) -> Bucket | None:
    """The bucket after taking one, or None when it is empty."""
    filled_at_ms = max(bucket.full_at_ms, now_ms) + rate.interval_ms
    if filled_at_ms - now_ms > rate.burst * rate.interval_ms:
        return None
    return Bucket(Milliseconds(filled_at_ms))


def wait_ms(rate: Rate, bucket: Bucket, now_ms: Milliseconds) -> Milliseconds:
    """How long until one is admitted again; 0 is now."""
    room_at_ms = bucket.full_at_ms - (rate.burst - 1) * rate.interval_ms
    return Milliseconds(max(0, room_at_ms - now_ms))
