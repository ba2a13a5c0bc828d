"""What the daemon and its worker agree on: messages between them, and caps in the environment.

The worker is `python -m gpu_node.shell.worker --kind torch|numpy|null`. It sends
`WorkerCapabilities` once, then answers every `TrainShard` with exactly one of `ShardTrained`,
`ShardFailed` or `ShardAborted`, every `DoWork` with `WorkDone` or one of the latter two, and every
`WriteInitialModel` with `InitialModelWritten` or `InitialModelFailed`. It does one thing at a time;
requests that arrive meanwhile wait. Some kinds of work answer calls while they are done: each
`CallWork` by any number of `CallOutput`. Closing its stdin stops it like `StopWorker`. Caps are in
the environment, since numerical libraries read their thread counts when they are imported.
"""

import os
import resource
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpu_node.core.events import TrainedUpdate
from gpu_node.core.memory import TrainingStart
from hypergpu.assignment import Assignment, FailureCause, Lease, Task
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest
from hypergpu.optimizer import OPTIMIZERS
from hypergpu.packed_work import PackedWork
from hypergpu.units import Bytes, Milliseconds

KINDS = ("torch", "numpy", "null")
RESULT_FILE = "result-"
"""What the name of a file begins with that a result names; its digest follows."""


class TrainShard(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Train one shard. The same request gives the same update bytes on a CPU."""

    assignment: Assignment
    start: TrainingStart
    model_path: str
    """The model as nodes hold it (no header, layout order); its digest was checked."""
    data_dir: str = ""
    """The folder of the user's files, checked as well; empty for the workload's own data."""
    node_dir: str = ""
    """The node's own folder of samples, where the job's stay on nodes; else empty."""
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


def result_file(lease: Lease, digest: Digest) -> str:
    """Name of the blob of a lease's result: two leases may have equal results."""
    return f"{RESULT_FILE}{lease.number}-{digest}"


class RingKey(msgspec.Struct, frozen=True):
    """The key of a node's stage in a ring, which the daemon makes for one start of its work."""

    secret: bytes
    """32 bytes."""
    signature: bytes
    """The node's, over job, lease and public key."""


class DoWork(msgspec.Struct, frozen=True, tag=True):
    """Do work of a kind other than training."""

    lease: Lease
    work: PackedWork
    input_dir: str = ""
    """Folder of the blobs that the work needs, named by their digests, which were checked."""
    output_dir: str = ""
    """Folder for the blob that the result names: see `output_path`."""
    ring_key: RingKey | None = None
    """For a stage of a ring; None: the work is none."""

    def input_path(self, blob: BlobRef) -> Path:
        """File of a blob that the work needs."""
        return Path(self.input_dir) / blob.digest

    def output_path(self, digest: Digest) -> Path:
        """Path to write the blob of the result to, replacing an older file."""
        return Path(self.output_dir) / result_file(self.lease, digest)


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
    data_dir: str = ""
    """The job's folder of data, on which its model may depend; empty: it has none."""


class AbortShard(msgspec.Struct, frozen=True, tag=True):
    """Drop a shard or other work; answered by `ShardAborted` unless its answer is already out."""

    lease: Lease


class CallWork(msgspec.Struct, frozen=True, tag=True):
    """Have the work at hand answer a call. Dropped where the lease is not of the work at hand."""

    lease: Lease
    call: int
    """Number of the call, by which it is answered."""
    body: bytes
    """The call, as only the kind knows it."""


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Answer a call no more."""

    lease: Lease
    call: int


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """Leave, dropping the work at hand."""


class UseSpare(msgspec.Struct, frozen=True, tag=True):
    """A spare becomes the worker: answered by its capabilities."""


class SpareReady(msgspec.Struct, frozen=True, tag=True):
    """A spare has imported what it needs."""


class WorkerCapabilities(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Device and workloads of a worker, which has proved the device with a real kernel."""

    device: str
    """``cpu``, ``cuda`` or ``mps``."""
    device_name: str
    memory_bytes: Bytes
    kind: str
    workloads: dict[str, int]
    """Workloads this worker can train and kinds of work that it can do, with their versions."""
    work_kinds: tuple[str, ...] = ()
    """Those of ``workloads`` that are kinds of packed work."""
    workload_kinds: dict[str, str] = {}
    """The same workloads with their kinds, by which an owner may name them."""
    torch: str = ""
    """Version of torch; empty: the worker has none."""
    lacking_operators: tuple[str, ...] = ()
    """Operators of programs that it lacks."""
    optimizers: tuple[str, ...] = OPTIMIZERS


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


class WorkDone(msgspec.Struct, frozen=True, tag=True):
    """Work of a kind other than training is done."""

    lease: Lease
    result: PackedWork
    blob: BlobRef | None = None
    """Blob that the result names, written to its `DoWork.output_path`."""


class CallOutput(msgspec.Struct, frozen=True, tag=True):
    """A part of the answer to a call, or with number 0 what the work says by itself."""

    lease: Lease
    call: int
    body: bytes
    """As only the kind knows it."""
    is_last: bool = False
    """Whether the answer is over."""
    is_urgent: bool = False
    """Whether somebody waits for it: it is not held back to be gathered with others."""


class ShardFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The shard cannot be trained, or the work not done. After a fatal failure the worker leaves,
    to be restarted.
    """

    lease: Lease
    reason: str
    cause: FailureCause = FailureCause.OTHER
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
    cause: FailureCause = FailureCause.OTHER
    is_fatal: bool = False


Request = (
    TrainShard
    | DoWork
    | WriteInitialModel
    | AbortShard
    | CallWork
    | CancelCall
    | StopWorker
    | UseSpare
)
ShardReply = ShardProgress | ShardTrained | WorkDone | CallOutput | ShardFailed | ShardAborted
InitialModelReply = InitialModelWritten | InitialModelFailed
Reply = WorkerCapabilities | SpareReady | ShardReply | InitialModelReply

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
    try:
        return _replies.decode(payload)
    except RecursionError as error:
        # A field that nobody knows may hold anything.
        raise msgspec.ValidationError(str(error)) from None


THREADS = "HYPERGPU_WORKER_THREADS"
MEMORY_BYTES = "HYPERGPU_WORKER_MEMORY_BYTES"
STEP_FLOOR_MS = "HYPERGPU_WORKER_STEP_FLOOR_MS"
SHARES = "HYPERGPU_WORKER_SHARES"
"""Workers that have even parts of the device's memory."""
SPARE = "HYPERGPU_WORKER_SPARE"
"""Set for a worker that waits to be used."""
SLOWNESS_FILE = "HYPERGPU_WORKER_SLOWNESS_FILE"
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class LimitError(ValueError):
    """A cap is not a number."""


class Limits(NamedTuple):
    """``threads`` is 1 unless set: CPU results then do not depend on how many cores there are."""

    threads: int
    memory_bytes: int
    """0: no cap. On a CPU it caps the process's data, of which torch itself takes up to 1 GB; on a
    GPU it caps what torch allocates there.
    """
    step_floor_ms: Milliseconds = Milliseconds(0)
    """No inner step takes less, so that this machine may play a slower one."""
    slowness_path: str = ""
    """A file by which others stretch that time while the worker runs; empty: nobody does."""
    shares: int = 1
    """Workers that the device's memory is divided among."""

    def memory_of(self, device_bytes: int) -> int:
        """Memory that the worker has of a device's, within its cap."""
        part_bytes = device_bytes // self.shares
        return min(part_bytes, self.memory_bytes) if self.memory_bytes else part_bytes


def limits_from_environment() -> Limits:
    """Read the caps.

    Raises:
        LimitError: Says which one is no number.
    """
    return Limits(
        _number(THREADS, 1, minimum=1),
        _number(MEMORY_BYTES, 0, minimum=0),
        Milliseconds(_number(STEP_FLOOR_MS, 0, minimum=0)),
        os.environ.get(SLOWNESS_FILE, ""),
        _number(SHARES, 1, minimum=1),
    )


def cap_threads(limits: Limits) -> None:
    """Cap library threads; call it before numpy or torch is imported."""
    for name in _LIBRARY_THREADS:
        os.environ[name] = str(limits.threads)


def cap_memory(limits: Limits) -> None:
    """Make allocations beyond the cap fail. Address space stays free, as drivers map much of it."""
    if limits.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))


def _number(name: str, default: int, *, minimum: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < minimum:
        raise LimitError(f"{name} is {text!r}; it must be a whole number of at least {minimum}")
    return int(text)
