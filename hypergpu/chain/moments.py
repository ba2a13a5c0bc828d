"""How times of a chain are written, and the values of what a contract says."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_TIMES = frozenset({"until", "releaseAt", "endedAt", "closedAt"})


def moment(at_s: int) -> str:
    """A time of the chain's own clock."""
    try:
        return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"second {at_s} of 1970"


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The values of an error, by name, for people."""
    return {name: _text(name, value) for name, value in values.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    return moment(value) if name in _TIMES and isinstance(value, int) else str(value)
