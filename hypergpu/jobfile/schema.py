"""The tables and keys of a job file, derived from `JobSpec` so that the two cannot differ."""

from collections.abc import Mapping

import msgspec

from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.values import Scalar

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
