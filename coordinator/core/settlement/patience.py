"""How long to leave a chain's RPC alone after it failed."""

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
