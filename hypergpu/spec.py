"""A job's settings in their validated form. `jobfile` turns a user's TOML into it and explains what
is wrong.
"""

import msgspec

SCHEMES = ("fp32", "bf16", "int8", "int4")


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is trained, and by how many."""

    rounds: int = 40
    inner_steps: int = 20
    """Inner steps a participant takes in a round (H)."""
    batch_size: int = 32
    seed: int = 0
    nodes: int = 1
    """The job starts when this many nodes have joined."""


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inner optimizer: AdamW."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: str = "constant"
    """``constant`` or ``cosine``; indexed by the samples the whole job has processed."""


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer optimizer: Nesterov SGD on the mean pseudo-gradient."""

    learning_rate: float = 0.7
    momentum: float = 0.9


class Codec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compression schemes of updates (up) and models (down): one of `SCHEMES`."""

    up: str = "int4"
    down: str = "int4"


class RoundRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a round closes before every expected update is there."""

    deadline_ms: int = 0
    """0: a round waits for every node that is not lost."""
    quorum: float = 0.6
    """Least share of the assigned updates that may close a round at its deadline, in (0, 1]."""


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which samples a participant sees."""

    sharding: str = "iid"
    """``iid`` or ``dirichlet``."""
    alpha: float = 0.5
    """Dirichlet concentration; only for ``dirichlet``."""
    partitions: int = 0
    """Partitions of a Dirichlet split; 0 is `Training.nodes`."""
    path: str = ""
    """A folder on the user's machine whose files are uploaded; empty for the workload's own data.
    """


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the held-out set is evaluated and the state is snapshot."""

    every: int = 5
    """Rounds between evaluations; the last round is always evaluated."""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training run, from the job file."""

    workload: str
    name: str = ""
    options: dict[str, str | int | float | bool] = {}
    """The workload's own settings, validated by the workload."""
    training: Training = Training()
    inner: Inner = Inner()
    outer: Outer = Outer()
    codec: Codec = Codec()
    round: RoundRule = RoundRule()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()


SETTABLE = (
    "training.rounds",
    "training.inner_steps",
    "inner.learning_rate",
    "inner.weight_decay",
    "outer.learning_rate",
    "outer.momentum",
    "round.deadline_ms",
    "round.quorum",
    "evaluation.every",
)
"""Keys that a running job accepts changes of, from its next round on."""
