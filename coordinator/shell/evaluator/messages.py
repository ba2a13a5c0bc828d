"""What the coordinator and its evaluator say to each other, as `hypergpu.wire.frames` on stdin and
stdout.

The evaluator is `python -m coordinator.shell.evaluator`. One request is answered by one reply.
"""

import msgspec

from hypergpu.ids import Digest
from hypergpu.units import Bytes, Samples

Options = dict[str, str | int | float | bool]


class Initialise(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make the initial model of a job and count the samples of each partition."""

    workload: str
    options: Options = {}
    seed: int = 0
    """Of the job: it keys the initial parameters and the division into partitions."""
    data_dir: str = ""
    """The user's files; empty for the workload's own data."""
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


class Evaluate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Measure a model on the held-out set."""

    workload: str
    options: Options = {}
    data_dir: str = ""
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


class JudgeUpdates(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Measure a model, the one that a round made of it, and it with single updates alone."""

    workload: str
    options: Options = {}
    data_dir: str = ""
    layout_digest: Digest
    base_path: str
    base_digest: Digest
    made_path: str
    made_digest: Digest
    updates: tuple[UpdateFile, ...]
    samples_most: int
    """Of the held-out set, evenly spread over it."""


class UpdatesJudged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Mean losses over the same samples; None of one that is not finite."""

    base_loss: float | None
    made_loss: float | None
    losses: tuple[float | None, ...]
    """Of the base with each of the updates alone."""


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request cannot be met. ``reason`` names a `hypergpu.errors.Reason`."""

    reason: str
    detail: str


Request = Initialise | Evaluate | JudgeUpdates
Reply = Initialised | Evaluated | UpdatesJudged | Failed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The payload of one frame."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """What the coordinator said. Raises `msgspec.ValidationError` for anything else."""
    return _requests.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """What the evaluator said. Raises `msgspec.ValidationError` for anything else."""
    return _replies.decode(payload)
