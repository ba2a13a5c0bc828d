"""Keys of job files and of changes to a running job: their types, their short names."""

from collections.abc import Mapping
from types import NoneType
from typing import get_args, get_origin

import msgspec

from hypergpu.jobfile.spec import JobSpec

SETTABLE: Mapping[str, str] = {
    "training.rounds": "Rounds in all; the job ends after the last of them",
    "training.inner_steps": "Steps of a node between two updates",
    "nodes.priority": "Jobs of a higher priority get their least nodes first",
    "nodes.weight": "Share of the other nodes, beside other jobs",
    "inner.learning_rate": "Learning rate of the nodes' optimizer",
    "inner.weight_decay": "Weight decay of the nodes' optimizer",
    "inner.clip_norm": "Longest gradient of a step; 0: any",
    "inner.micro_batch": "Samples that are computed at a time; 0: the whole batch",
    "outer.learning_rate": "Learning rate of the step that is made of a round's updates",
    "outer.momentum": "Momentum of that step, from 0 to below 1",
    "round.deadline_ms": "Longest time of a round in milliseconds; 0: as planned, or none",
    "round.quorum": "Least share of the updates that may close a round",
    "evaluation.every": "Rounds between evaluations",
    "evaluation.target": "Value of the metric at which the job ends; 0: none",
    "evaluation.target_mode": "Whether the metric rises (max) or falls (min); name: by its name",
    "evaluation.samples": "Most held-out samples of an evaluation between the first and the last",
    "aware.utilisation": "Share of their time that nodes are to compute",
    "aware.inner_steps_max": "Most steps of a node between two updates",
    "aware.rounds_min": "Least rounds",
    "pay.escrow": "Most that the job pays, in the token's smallest units",
}
"""Keys that a running job accepts changes of, from its next round on, and what each means."""


Scalar = str | int | float | bool
KeyType = type[Scalar] | type[tuple[str, ...]]


def _sections() -> dict[str, type[msgspec.Struct]]:
    return {
        field.name: field.type
        for field in msgspec.structs.fields(JobSpec)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


def _type_of(field: msgspec.structs.FieldInfo) -> KeyType:
    """The type of a key; one that may be left out without a default is a union with None."""
    if get_origin(field.type) is tuple:
        return tuple
    kinds: list[KeyType] = [each for each in get_args(field.type) if each is not NoneType]
    return (kinds or [field.type])[0]


SECTIONS: Mapping[str, type[msgspec.Struct]] = _sections()
"""Table name to its struct."""

KEYS: Mapping[str, KeyType] = {
    f"{table}.{field.name}": _type_of(field)
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
