"""How times of a chain are written."""

from datetime import UTC, datetime


def moment(at_s: int) -> str:
    """A time of the chain's own clock."""
    try:
        return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"second {at_s} of 1970"
