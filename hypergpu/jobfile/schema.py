"""The keys of a job file, derived from `JobSpec`, and their short names."""

from collections.abc import Mapping

import msgspec

from hypergpu.jobfile.spec import JobSpec

Scalar = str | int | float | bool


def _sections() -> dict[str, type[msgspec.Struct]]:
    return {
        field.name: field.type
        for field in msgspec.structs.fields(JobSpec)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


SECTIONS: Mapping[str, type[msgspec.Struct]] = _sections()
"""Table name to its struct."""

KEYS: Mapping[str, type[Scalar]] = {
    f"{table}.{field.name}": field.type
    for table, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
}
"""Every dotted key and its type. Keys above the first table and the options of workloads are left
out.
"""

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
