"""What happened to a node: past tense, frozen, stamped by the shell's monotonic clock."""

from enum import Enum

import msgspec

from gpu_node.core.update import Update
from hypergpu.ids import JobId
from hypergpu.statements.assignment import Assignment, Lease
from hypergpu.units import Milliseconds


class Timer(Enum):
    """What a node waits for by the clock; at most one of each is armed."""

    RECONNECT = "reconnect"
    RETRY = "retry"  # of a download or an upload, or an upload's planned beginning
    WORKER = "worker"  # the pause before a worker is started again
    STALL = "stall"  # how long a training may show no progress
    DRAIN = "drain"  # how long a drain may take


class Happened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every event carries: milliseconds of a clock that never goes back."""

    at_ms: Milliseconds


class Started(Happened, frozen=True, tag=True):
    """The daemon is up. Without a certificate it joins first."""

    has_certificate: bool


class Joined(Happened, frozen=True, tag=True):
    """The coordinator answered the join with a certificate."""


class JoinFailed(Happened, frozen=True, tag=True):
    """The join did not get through; it may later."""

    reason: str


class JoinRefused(Happened, frozen=True, tag=True):
    """The coordinator, or the check of its CA, said no: the token will not do."""

    reason: str


class Connected(Happened, frozen=True, tag=True):
    """The control stream is open and the coordinator said welcome."""


class LinkLost(Happened, frozen=True, tag=True):
    """The control stream, or the attempt to open it, broke."""

    reason: str


class LinkRefused(Happened, frozen=True, tag=True):
    """The coordinator refused the control stream: version, revocation, certificate out of date."""

    reason: str


class ShardAssigned(Happened, frozen=True, tag=True):
    """The coordinator gave work, or said again that it had given it.

    The control stream keeps order: a job's newest assignment is the coordinator's last word.
    """

    assignment: Assignment


class ShardCancelled(Happened, frozen=True, tag=True):
    """The coordinator made a lease void."""

    lease: Lease
    reason: str


class JobReleased(Happened, frozen=True, tag=True):
    """The node's part in a job is over."""

    job_id: JobId
    reason: str


class InputsFetched(Happened, frozen=True, tag=True):
    """The model and the data of a lease lie on disk, verified."""

    lease: Lease


class FetchBroken(Happened, frozen=True, tag=True):
    """A download broke; what came is kept and it can go on."""

    lease: Lease
    reason: str
    has_progressed: bool = False
    """Bytes came since the last attempt: the link is poor, not dead."""


class FetchRefused(Happened, frozen=True, tag=True):
    """The inputs cannot be had: unknown, or not what their digest says."""

    lease: Lease
    reason: str


class TrainingFinished(Happened, frozen=True, tag=True):
    """The update and the end state of a lease are durable."""

    lease: Lease
    update: Update


class TrainingFailed(Happened, frozen=True, tag=True):
    """The worker, still well, cannot train this."""

    lease: Lease
    reason: str


class TrainingAborted(Happened, frozen=True, tag=True):
    """The worker dropped a shard as told."""

    lease: Lease


class TrainingProgressed(Happened, frozen=True, tag=True):
    """The worker has done more inner steps."""

    lease: Lease
    steps_done: int


class WorkerReady(Happened, frozen=True, tag=True):
    """A worker process is up and can compute."""


class WorkerDied(Happened, frozen=True, tag=True):
    """The worker process is gone, or had to be ended."""

    reason: str
    was_ready: bool = True
    """It had got as far as `WorkerReady`: the machine is well, the work may not be."""


class UpdateAccepted(Happened, frozen=True, tag=True):
    """The coordinator holds the update durably."""

    lease: Lease


class UpdateLate(Happened, frozen=True, tag=True):
    """The coordinator refused the update because its lease is void or its round is closed."""

    lease: Lease
    reason: str


class UpdateRefused(Happened, frozen=True, tag=True):
    """The coordinator refused the update for what it is; sending it again cannot help."""

    lease: Lease
    reason: str


class UploadBroken(Happened, frozen=True, tag=True):
    """An upload broke; it can go on."""

    lease: Lease
    reason: str
    has_progressed: bool = False


class TimerFired(Happened, frozen=True, tag=True):
    """The time that `SetTimer` asked for has come. Before the time last asked for it is ignored."""

    timer: Timer


class DrainRequested(Happened, frozen=True, tag=True):
    """The operator or a first SIGTERM: finish or hand back, then leave."""

    reason: str


class StopRequested(Happened, frozen=True, tag=True):
    """A second SIGTERM: leave now."""

    reason: str


Event = (
    Started
    | Joined
    | JoinFailed
    | JoinRefused
    | Connected
    | LinkLost
    | LinkRefused
    | ShardAssigned
    | ShardCancelled
    | JobReleased
    | InputsFetched
    | FetchBroken
    | FetchRefused
    | TrainingFinished
    | TrainingFailed
    | TrainingAborted
    | TrainingProgressed
    | WorkerReady
    | WorkerDied
    | UpdateAccepted
    | UpdateLate
    | UpdateRefused
    | UploadBroken
    | TimerFired
    | DrainRequested
    | StopRequested
)
