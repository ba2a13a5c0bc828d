"""Events of a node: past tense, frozen, stamped by the shell's monotonic clock."""

from enum import Enum

import msgspec

from hypergpu.assignment import Assignment, FailureCause, Lease, PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId
from hypergpu.packed_work import PackedWork
from hypergpu.units import Bytes, Milliseconds, Samples


class TrainedUpdate(msgspec.Struct, frozen=True):
    """A finished update, and the worker's report of its training."""

    digest: Digest
    size_bytes: Bytes
    inner_steps: int
    samples: Samples
    compute_ms: Milliseconds = Milliseconds(0)
    loss_first: float | None = None
    """None when it is not finite."""
    loss_last: float | None = None
    encode_ms: Milliseconds = Milliseconds(0)
    """Compressing the update, and making it and the end state durable."""
    data_samples: Samples = Samples(0)
    """Samples in the node's own folder; 0: it trained on the job's data."""
    memory_before_bytes: Bytes = Bytes(0)
    """Device memory before the first inner step; 0: not measured."""
    memory_peak_bytes: Bytes = Bytes(0)
    """At that step's peak."""


class Timer(Enum):
    """Timers of a node; at most one of each is set."""

    RECONNECT = "reconnect"
    RETRY = "retry"  # retries a download or an upload, or begins an upload at its planned time
    RETRY_NEXT = "retry next"  # retries the download for the work after the work at hand
    WORKER = "worker"  # the pause before a worker is started again
    STALL = "stall"  # how long a training may show no progress
    DRAIN = "drain"  # how long a drain may take


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event, with milliseconds of a clock that never goes back."""

    at_ms: Milliseconds


class Started(NodeEvent, frozen=True):
    """The daemon is up. Without a certificate it joins first."""

    has_certificate: bool


class Joined(NodeEvent, frozen=True):
    """The coordinator answered the join with a certificate."""


class JoinFailed(NodeEvent, frozen=True):
    """The join did not get through; it may later."""

    reason: str


class JoinRejected(NodeEvent, frozen=True):
    """The coordinator, or the check of its CA, rejected the join: the token will not do."""

    reason: str


class Connected(NodeEvent, frozen=True):
    """The control stream is open and the coordinator answered with a welcome."""


class LinkLost(NodeEvent, frozen=True):
    """The control stream, or the attempt to open it, broke."""

    reason: str
    wait_ms: Milliseconds = Milliseconds(0)
    """When the other side said to dial again; 0: it said nothing."""
    heartbeat_ms: Milliseconds = Milliseconds(0)
    """The interval of heartbeats by which the node dials, see `ToldPace`; 0: it was told none."""
    is_silent: bool = False
    """Nobody answered in time: whoever is there may have more to do than it can."""


class LinkRejected(NodeEvent, frozen=True):
    """The coordinator rejected the control stream: version, revocation, expired certificate."""

    reason: str


class ShardAssigned(NodeEvent, frozen=True):
    """The coordinator assigned work, or repeated an assignment.

    The control stream keeps order: the newest assignment of a job replaces those before it.
    """

    assignment: Assignment


class WorkAssigned(NodeEvent, frozen=True):
    """As `ShardAssigned`, of work of a kind other than training."""

    assignment: PackedAssignment


class ShardCancelled(NodeEvent, frozen=True):
    """The coordinator made a lease void."""

    lease: Lease
    reason: str


class JobReleased(NodeEvent, frozen=True):
    """The node's part in a job is over."""

    job_id: JobId
    reason: str


class InputsFetched(NodeEvent, frozen=True):
    """The model and the data of a lease lie on disk, verified."""

    lease: Lease


class FetchBroken(NodeEvent, frozen=True):
    """A download broke; what came is kept and it can go on."""

    lease: Lease
    reason: str
    has_progressed: bool = False
    """Bytes arrived since the last attempt: the link is poor, not dead."""


class FetchRejected(NodeEvent, frozen=True):
    """The work cannot begin: its owner does not allow it, or its inputs are unknown or not what
    their digest says.
    """

    lease: Lease
    reason: str
    cause: FailureCause = FailureCause.OTHER


class TrainingFinished(NodeEvent, frozen=True):
    """The update and the end state of a lease are durable."""

    lease: Lease
    update: TrainedUpdate


class WorkFinished(NodeEvent, frozen=True):
    """The worker has done work of a kind other than training. What it says is in memory alone, and
    does not outlive the daemon; a blob that it names lies in the job's folder.
    """

    lease: Lease
    result: PackedWork
    blob: BlobRef | None = None


class TrainingFailed(NodeEvent, frozen=True):
    """The worker, still well, cannot train this."""

    lease: Lease
    reason: str
    cause: FailureCause = FailureCause.OTHER


class TrainingAborted(NodeEvent, frozen=True):
    """The worker dropped a shard on request."""

    lease: Lease


class TrainingProgressed(NodeEvent, frozen=True):
    """The worker has done more inner steps."""

    lease: Lease
    steps_done: int
    loss: float | None = None
    """None when it is not finite."""


class WorkerReady(NodeEvent, frozen=True):
    """A worker process is up and can compute."""


class WorkerDied(NodeEvent, frozen=True):
    """The worker process is gone, or had to be ended."""

    reason: str
    cause: FailureCause = FailureCause.OTHER
    was_ready: bool = True
    """The process had reached `WorkerReady`: the machine is well, the work may not be."""


class UploadAccepted(NodeEvent, frozen=True):
    """The coordinator holds the update durably."""

    lease: Lease


class UploadLate(NodeEvent, frozen=True):
    """The coordinator rejected the update because its lease is void or its round is closed."""

    lease: Lease
    reason: str


class UploadRejected(NodeEvent, frozen=True):
    """The coordinator rejected the content of the update; sending it again cannot help."""

    lease: Lease
    reason: str


class UploadBroken(NodeEvent, frozen=True):
    """An upload broke; it can go on."""

    lease: Lease
    reason: str
    has_progressed: bool = False


class TimerFired(NodeEvent, frozen=True):
    """A timer fired. One that fires before the time last set is ignored."""

    timer: Timer


class AvailabilityChanged(NodeEvent, frozen=True):
    """The owner's limits let the node work, or no longer."""

    reason: str
    """Why it may do nothing now; empty: it may work."""


class DrainRequested(NodeEvent, frozen=True):
    """The operator or a first SIGTERM: finish or hand back, then leave."""

    reason: str


class StopRequested(NodeEvent, frozen=True):
    """A second SIGTERM: leave now."""

    reason: str
