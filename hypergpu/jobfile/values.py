"""Conversion of a job file's values to their fields' types; a wrong type is a problem."""

import re
from decimal import Decimal
from typing import NamedTuple

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9._]+([eE][+-]?[0-9]+)?", re.ASCII)
_EXAMPLES = {int: "100", float: "0.001"}
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_SAID = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

Scalar = str | int | float | bool


class InvalidValue(NamedTuple):
    """A value of the wrong type, with the reason and the fix."""

    what: str
    fix: str


def quoted_value(value: object) -> str:
    """Return a value as a sentence quotes it."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"


def convert_value(value: object, wanted: type[Scalar]) -> Scalar | InvalidValue:
    """Return ``value`` as ``wanted``, or the reason why it is not one.

    A whole number passes for a number; nothing else is converted.
    """
    if type(value) is wanted:
        return wanted(value)
    if wanted is float and type(value) is int:
        return float(value)
    return InvalidValue(f"it is {quoted_value(value)}, not {_SAID[wanted]}", _fix(value, wanted))


def _fix(value: object, wanted: type[Scalar]) -> str:
    if isinstance(value, str) and wanted in (int, float) and not _NUMBER.fullmatch(value.strip()):
        return f"give {_SAID[wanted]}, for example {_EXAMPLES[wanted]}"
    if isinstance(value, str) and wanted in (int, float, bool):
        return f"write {_SAID[wanted]} without quotes"
    if wanted is str and isinstance(value, int | float):
        return f'write it in quotes: "{value}"'
    if wanted is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return f"give {_SAID[wanted]}"


def duration_ms(value: object) -> int | InvalidValue:
    """Return a duration such as ``"60s"`` in milliseconds, or the reason why it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return InvalidValue(
            f"{value} has no unit", f'say the unit, for example "{value}s" or "{value}ms"'
        )
    if not isinstance(value, str):
        return InvalidValue(
            f"it is {quoted_value(value)}, not a duration", 'write, for example, "60s"'
        )
    if value.strip().isdecimal():
        shown = value.strip()
        return InvalidValue(f'"{shown}" has no unit', f'say the unit, for example "{shown}s"')
    found = _DURATION.fullmatch(value.strip())
    if found is None:
        return InvalidValue(
            f'"{value}" is not a duration', 'write a number and ms, s, m or h, for example "90s"'
        )
    span_ms = Decimal(found[1]) * _UNIT_MS[found[2]]
    if span_ms != int(span_ms):
        return InvalidValue(f'"{value}" is not a whole count of milliseconds', "round it")
    return int(span_ms)
