"""Lengths of time with their unit, such as ``60s``."""

import re
from decimal import Decimal

from hypergpu.jobfile.problem import quoted_value

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


class DurationError(ValueError):
    """A value that is no duration, with the fix. Its text is both, a line each."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\n{fix}")
        self.what = what
        self.fix = fix


def duration_ms(value: object) -> int:
    """Return a duration such as ``"60s"`` in milliseconds.

    Raises:
        DurationError: It is none.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        fix = f'say the unit, for example "{value}s" or "{value}ms"'
        raise DurationError(f"{value} has no unit", fix)
    if not isinstance(value, str):
        raise DurationError(
            f"it is {quoted_value(value)}, not a duration", 'write, for example, "60s"'
        )
    text = value.strip()
    if text.isdecimal():
        raise DurationError(f'"{text}" has no unit', f'say the unit, for example "{text}s"')
    found = _DURATION.fullmatch(text)
    if found is None:
        fix = 'write a number and ms, s, m or h, for example "90s"'
        raise DurationError(f'"{value}" is not a duration', fix)
    span_ms = Decimal(found[1]) * _UNIT_MS[found[2]]
    if span_ms != int(span_ms):
        raise DurationError(f'"{value}" is not a whole count of milliseconds', "round it")
    return int(span_ms)
