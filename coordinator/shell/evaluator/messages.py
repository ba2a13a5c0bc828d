"""Messages between the coordinator and its evaluator: msgpack in `hypergpu.wire.frames`, on stdin
and stdout.

The evaluator is `python -m coordinator.shell.evaluator`. One request is answered by one reply.
"""

import msgspec

from hypergpu.ids import Digest
from hypergpu.units import Bytes, Samples


class WorkloadRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fields of every request: the workload, its options and its data."""

    workload: str
    options: dict[str, str | int | float | bool] = {}
    data_dir: str = ""
    """The user's files; empty for the workload's own data."""


class Initialise(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Make the initial model of a job and count the samples of each partition."""

    seed: int = 0
    """The job's seed: it keys the initial parameters and the division into partitions."""
    sharding: str = "iid"
    """``iid`` or ``dirichlet``."""
    alpha: float = 0.0
    """Dirichlet concentration; not looked at for ``iid``."""
    partitions: int = 1
    model_path: str
    """Where the model is written."""
    layout_path: str
    """Where the layout's canonical JSON is written."""


class Initialised(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model and the layout lie where they were asked for, synced."""

    digest: Digest
    size_bytes: Bytes
    layout_json: str
    partition_sizes: tuple[Samples, ...]
    workload_version: int


class Evaluate(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Measure a model on the held-out set."""

    model_path: str
    layout_digest: Digest


class Evaluated(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Mean loss over the held-out set, and the workload's metric."""

    loss: float
    metric: float
    metric_name: str


class UpdateFile(msgspec.Struct, frozen=True):
    """An update on disk."""

    path: str
    scheme: str


class MeasureUpdates(WorkloadRequest, frozen=True, tag=True, kw_only=True):
    """Measure a model, the one that a round made of it, and it with single updates alone."""

    layout_digest: Digest
    base_path: str
    base_digest: Digest
    made_path: str
    made_digest: Digest
    updates: tuple[UpdateFile, ...]
    samples_most: int
    """Most held-out samples to use, spread evenly over the set."""


class UpdatesMeasured(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Mean losses over the same samples; None where a loss is not finite."""

    base_loss: float | None
    made_loss: float | None
    losses: tuple[float | None, ...]
    """Losses of the base with each of the updates alone."""


class EvaluatorFailure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request cannot be met. ``reason`` names a `hypergpu.errors.Reason`."""

    reason: str
    detail: str


Request = Initialise | Evaluate | MeasureUpdates
Reply = Initialised | Evaluated | UpdatesMeasured | EvaluatorFailure
