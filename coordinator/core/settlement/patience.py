"""How long to leave a chain's RPC alone after it failed, and when to say that it stands still."""

FIRST_MS = 250
MOST_MS = 15_000


def rest_ms(failures: int, asked_ms: int = 0) -> int:
    """Doubles with each failure in a row, from a quarter of a second to 15.

    Args:
        failures: In a row; 0 is none, and no rest.
        asked_ms: What the RPC asked for; longer than our own it is honoured.
    """
    if failures <= 0:
        return 0
    return max(min(FIRST_MS << min(failures - 1, 16), MOST_MS), asked_ms)


STILL_MS = 30_000
_STILL_BLOCKS = 10


def standstill(block: int, since: str, still_ms: int, block_ms: int) -> str:
    """What to say of a chain whose newest block stays the same; empty while that may be chance.

    Nothing else shows it: an RPC that stands still answers all that it is asked.

    Args:
        block: The newest one's number.
        since: Its time, by the chain's own clock.
        still_ms: For how long there has been no other.
        block_ms: How often the chain makes one.
    """
    if still_ms < max(STILL_MS, _STILL_BLOCKS * block_ms):
        return ""
    return f"no new block since {since} (block {block}): the chain or its RPC stands still"
