"""Messages between the daemon and its worker, framed as `hypergpu.wire.frames` says.

The worker is `python -m gpu_node.shell.worker --kind torch|numpy|null`. It says `Ready` once, then
answers every `Train` with exactly one of `Trained`, `Failed` or `Aborted`, and every `Draw` with
`Drawn` or `NotDrawn`. It does one thing at a time; what arrives meanwhile waits. Closing its stdin
stops it like `Stop`.
"""

import msgspec

from hypergpu.ids import Digest, JobId, Slot
from hypergpu.units import Bytes, Milliseconds, Samples

KINDS = ("torch", "numpy", "null")


class PositionRange(msgspec.Struct, frozen=True, array_like=True):
    """Positions [start, start + count) of a partition's sample stream."""

    start: int
    count: Samples


class Ahead(msgspec.Struct, frozen=True):
    """Inner steps of a round that start from this node's own end state of the round before."""

    round: int
    inner_steps: int
    ranges: tuple[PositionRange, ...]
    seed: int
    global_samples: Samples
    total_samples: Samples


class Train(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Train one shard. The same request gives the same update bytes on a CPU."""

    job_id: JobId
    round: int
    lease: int
    slot: Slot
    workload: str
    workload_version: int
    options: dict[str, str | int | float | bool] = {}
    inner_steps: int
    batch_size: int
    """Of this node."""
    stated_batch_size: int = 0
    """As the job file has it; 0: the same."""
    learning_rate: float
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Warm-up ends when the whole job has processed ``warmup_steps`` times the stated batch in
    samples.
    """
    schedule: str = "constant"
    """``constant`` or ``cosine``."""
    codec: str
    """Compression scheme of the update."""
    seed: int
    """Keyed by (job seed, slot, round): whatever the model draws while it trains."""
    global_samples: Samples = Samples(0)
    """Samples the whole job had processed when the round began."""
    total_samples: Samples = Samples(0)
    """Schedules end here; 0 with ``constant``."""
    partition: int = 0
    partitions: int = 1
    skew_alpha: float = 0.0
    """Dirichlet concentration of the label skew; 0 is IID."""
    data_seed: int = 0
    """Keys partitions and permutations: the same for every node of the job."""
    ranges: tuple[PositionRange, ...]
    model_path: str
    """The model as nodes hold it (no header, layout order)."""
    layout_digest: Digest
    data_dir: str = ""
    """The folder of the user's files, verified by the daemon; empty for the workload's own data."""
    state_dir: str
    """Where this node's end states of this job lie; made when missing."""
    resume_from: int | None = None
    """The round whose end state this one starts from; None starts with a fresh optimizer and
    residual.
    """
    returns_update: bool = False
    """The update of ``resume_from`` was refused: it goes back into the error feedback."""
    update_path: str
    """Where the update is written, replacing what is there."""
    begun: Ahead | None = None
    """What ``ranges`` begin with, taken before the model is looked at; without the end state of the
    round before these are steps like all others.
    """
    ahead: Ahead | None = None
    """What the next round's shard will begin with: the worker takes these steps once the update is
    out, as long as it is asked for nothing else.
    """

    @property
    def usual_batch_size(self) -> int:
        """Samples in a step of the job, whatever they are on this node."""
        return self.stated_batch_size or self.batch_size


class Draw(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make the first model of a job. The same request gives the same bytes wherever the same
    libraries compute them.
    """

    number: int
    """Names the request; of the daemon's own count."""
    workload: str
    workload_version: int
    options: dict[str, str | int | float | bool] = {}
    seed: int
    """Of the job."""
    model_path: str
    """Where the model is written, as in `Train`."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop the shard with this lease; answered by `Aborted` unless its answer is already out."""

    lease: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave, dropping what is under way."""


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker has chosen its device and proved it with a real kernel."""

    device: str
    """``cpu``, ``cuda`` or ``mps``."""
    device_name: str
    memory_bytes: Bytes
    kind: str
    workloads: dict[str, int]
    """Workloads this worker can train, with their versions."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """At most four a second."""

    lease: int
    steps_done: int
    steps_total: int
    loss: float


class Trained(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The update and the end state are durable."""

    lease: int
    update_digest: Digest
    update_bytes: Bytes
    inner_steps: int
    samples: Samples
    compute_ms: Milliseconds
    loss_first: float
    loss_last: float


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The shard cannot be trained. ``is_fatal``: the worker itself must be restarted, and leaves
    after this.
    """

    lease: int
    reason: str
    is_fatal: bool = False


class Drawn(msgspec.Struct, frozen=True, tag=True):
    """The model lies where it was asked for, not synced."""

    number: int


class NotDrawn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model cannot be made here. ``is_fatal`` as in `Failed`."""

    number: int
    reason: str
    is_fatal: bool = False


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The shard was dropped; nothing of it is left behind."""

    lease: int


Request = Train | Draw | Abort | Stop
TrainingReply = Ready | Progress | Trained | Failed | Aborted
DrawingReply = Drawn | NotDrawn
Reply = TrainingReply | DrawingReply

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The payload of one frame."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """What the daemon said. Raises `MsgspecError` or `UnicodeError` for anything else."""
    return _requests.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """What the worker said. Raises `MsgspecError` or `UnicodeError` for anything else."""
    return _replies.decode(payload)
