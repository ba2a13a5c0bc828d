"""Messages between the daemon and its worker, framed as `hypergpu.wire.frames` says.

The worker is `python -m gpu_node.shell.worker --kind torch|numpy|null`. It sends
`WorkerCapabilities` once, then answers every `TrainShard` with exactly one of `ShardTrained`,
`ShardFailed` or `ShardAborted`, and every `WriteInitialModel` with `InitialModelWritten` or
`InitialModelFailed`. It does one thing at a time; requests that arrive meanwhile wait. Closing its
stdin stops it like `StopWorker`.
"""

import msgspec

from gpu_node.core.end_states import TrainingStart
from gpu_node.core.update import TrainedUpdate
from hypergpu.statements.assignment import Assignment, Lease, Task
from hypergpu.units import Bytes

KINDS = ("torch", "numpy", "null")


class TrainShard(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Train one shard. The same request gives the same update bytes on a CPU."""

    assignment: Assignment
    start: TrainingStart
    model_path: str
    """The model as nodes hold it (no header, layout order); its digest was checked."""
    data_dir: str = ""
    """The folder of the user's files, checked as well; empty for the workload's own data."""
    state_dir: str
    """Folder of this node's end states of this job; made when missing."""
    update_path: str
    """Path to write the update to, replacing an older file."""

    @property
    def lease(self) -> Lease:
        """The lease of the shard."""
        return self.assignment.lease

    @property
    def task(self) -> Task:
        """Everything that decides the update's bytes, besides the start."""
        return self.assignment.task


class WriteInitialModel(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write a job's first model. The same request gives the same bytes with the same libraries."""

    number: int
    """Number of the request, by which it is answered."""
    workload: str
    workload_version: int
    options: dict[str, str | int | float | bool] = {}
    seed: int
    """The job's seed."""
    model_path: str
    """Path to write the model to, as nodes hold it."""


class AbortShard(msgspec.Struct, frozen=True, tag=True):
    """Drop a shard; answered by `ShardAborted` unless its answer is already out."""

    lease: Lease


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """Leave, dropping the work at hand."""


class WorkerCapabilities(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Device and workloads of a worker, which has proved the device with a real kernel."""

    device: str
    """``cpu``, ``cuda`` or ``mps``."""
    device_name: str
    memory_bytes: Bytes
    kind: str
    workloads: dict[str, int]
    """Workloads this worker can train, with their versions."""


class ShardProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of a shard, at most four times a second."""

    lease: Lease
    steps_done: int
    steps_total: int
    loss: float


class ShardTrained(msgspec.Struct, frozen=True, tag=True):
    """The update and the end state are durable."""

    lease: Lease
    update: TrainedUpdate


class ShardFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The shard cannot be trained. After a fatal failure the worker leaves, to be restarted."""

    lease: Lease
    reason: str
    is_fatal: bool = False


class ShardAborted(msgspec.Struct, frozen=True, tag=True):
    """The shard was dropped; nothing of it is left behind."""

    lease: Lease


class InitialModelWritten(msgspec.Struct, frozen=True, tag=True):
    """The model is at its path, not synced."""

    number: int


class InitialModelFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model cannot be made here. ``is_fatal`` as in `ShardFailed`."""

    number: int
    reason: str
    is_fatal: bool = False


Request = TrainShard | WriteInitialModel | AbortShard | StopWorker
ShardReply = ShardProgress | ShardTrained | ShardFailed | ShardAborted
InitialModelReply = InitialModelWritten | InitialModelFailed
Reply = WorkerCapabilities | ShardReply | InitialModelReply

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The payload of one frame."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """A message of the daemon. Raises `MsgspecError` or `UnicodeError` for anything else."""
    return _requests.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """A message of the worker. Raises `MsgspecError` or `UnicodeError` for anything else."""
    return _replies.decode(payload)
