"""The tables, keys and value types of a job file, derived from `JobSpec`."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

import msgspec

from hypergpu.jobfile.spec import JobSpec

Scalar = str | int | float | bool

TOP = ""
"""The table name of keys above the first ``[table]``."""


def _sections() -> dict[str, type[msgspec.Struct]]:
    return {
        field.name: field.type
        for field in msgspec.structs.fields(JobSpec)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


def _keys() -> dict[str, dict[str, type[Scalar]]]:
    tables: dict[str, dict[str, type[Scalar]]] = {
        TOP: {
            field.name: field.type
            for field in msgspec.structs.fields(JobSpec)
            if field.type in (str, int, float)
        }
    }
    for name, struct in SECTIONS.items():
        tables[name] = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return tables


SECTIONS: Mapping[str, type[msgspec.Struct]] = _sections()
"""Table name to its struct."""

KEYS: Mapping[str, Mapping[str, type[Scalar]]] = _keys()
"""Table name to its keys and their types."""

OPTIONS = "options"
"""The table that belongs to the workload."""

DURATIONS: Mapping[str, str] = {"round.deadline": "round.deadline_ms"}
"""Keys that take a duration with its unit, and the millisecond key that they set."""

ALIASES: Mapping[str, str] = {
    "lr": "inner.learning_rate",
    "weight_decay": "inner.weight_decay",
    "outer_lr": "outer.learning_rate",
    "momentum": "outer.momentum",
    "rounds": "training.rounds",
    "inner_steps": "training.inner_steps",
    "deadline": "round.deadline",
    "quorum": "round.quorum",
}
"""Short names that `hypergpu job set` accepts."""

NICKNAMES: Mapping[str, str] = {
    "lr": "learning_rate",
    "h": "inner_steps",
    "steps": "inner_steps",
    "batch": "batch_size",
    "warmup": "warmup_steps",
    "deadline_s": "deadline",
    "timeout": "deadline",
    "eval_every": "every",
}
"""Names that other systems use, for hints only."""


def dotted_key(table: str, key: str) -> str:
    """Return the full name of a table's key."""
    return f"{table}.{key}" if table else key


def tables_with(key: str) -> tuple[str, ...]:
    """Return the tables that have ``key``, for hints about a key in the wrong table."""
    return tuple(table for table, keys in KEYS.items() if key in keys)


def default_of(key: str) -> object:
    """The default of a dotted key of one of the `SECTIONS`."""
    table, _, name = key.partition(".")
    return getattr(SECTIONS[table](), name)


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9._]+([eE][+-]?[0-9]+)?", re.ASCII)
_EXAMPLES = {int: "100", float: "0.001"}
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_SAID = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


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
