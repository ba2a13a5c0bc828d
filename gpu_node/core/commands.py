"""Commands that the steps of a node give to its shell. They are imperative, keyed by lease and safe
to perform twice.
"""

from enum import Enum

import msgspec

from gpu_node.core.events import Timer, TrainedUpdate
from gpu_node.core.memory import TrainingStart
from hypergpu.assignment import AnyAssignment, Assignment, FailureCause, Lease, PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.ids import JobId
from hypergpu.packed_work import PackedWork
from hypergpu.units import Milliseconds


class NodeCommand(msgspec.Struct, frozen=True):
    """A command to the shell."""


class Departure(Enum):
    """How a daemon ends."""

    DRAINED = "drained"
    STOPPED = "stopped"
    REJECTED = "rejected"


class Join(NodeCommand, frozen=True):
    """Trade the token for a certificate; answered by `Joined`, `JoinFailed` or `JoinRejected`."""


class OpenLink(NodeCommand, frozen=True):
    """Dial and open the control stream; answered by `Connected`, `LinkLost` or `LinkRejected`."""

    working: tuple[Lease, ...]
    """Leases that the hello names as still being worked on."""


class FetchInputs(NodeCommand, frozen=True):
    """Fetch what the work needs, of a training the model and the data; answered by `InputsFetched`,
    `FetchBroken` or `FetchRejected`.

    Nothing happens when that is under way for this lease already.
    """

    assignment: AnyAssignment


class StopTransfer(NodeCommand, frozen=True):
    """Stop the download or the upload of a lease. Bytes that arrived stay where they are."""

    lease: Lease


class StartTraining(NodeCommand, frozen=True):
    """Train a shard.

    Answered by `TrainingFinished`, `TrainingFailed`, `TrainingAborted` or `WorkerDied`.
    """

    assignment: Assignment
    start: TrainingStart
    kept_rounds: tuple[int, ...]
    """Rounds whose end states to keep. Others on disk were never finished and are deleted."""


class PerformWork(NodeCommand, frozen=True):
    """Do work of a kind other than training.

    Answered by `WorkFinished`, `TrainingFailed`, `TrainingAborted` or `WorkerDied`.
    """

    assignment: PackedAssignment


class AbortTraining(NodeCommand, frozen=True):
    """Tell the worker to drop its work, and end it should it not answer."""

    lease: Lease


class StartWorker(NodeCommand, frozen=True):
    """Start the worker without work; answered by `WorkerReady` or `WorkerDied`."""


class EndWorker(NodeCommand, frozen=True):
    """End the worker process at once; answered by `WorkerDied` of the same reason and cause."""

    reason: str
    cause: FailureCause = FailureCause.OTHER


class SendUpdate(NodeCommand, frozen=True):
    """Send an update; answered by `UploadAccepted`, `UploadLate`, `UploadRejected`, `UploadBroken`.

    Nothing happens when that is under way for this lease already.
    """

    assignment: Assignment
    """The work, under its newest lease."""
    update: TrainedUpdate


class SendResult(NodeCommand, frozen=True):
    """Send the result of work of a kind other than training; answered as `SendUpdate` is.

    Nothing happens when that is under way for this lease already.
    """

    assignment: PackedAssignment
    result: PackedWork
    blob: BlobRef | None = None
    """Blob that the result names: it is sent first."""


class HandBack(NodeCommand, frozen=True):
    """Tell the coordinator that a lease's work will not be done."""

    lease: Lease
    reason: str
    """For people."""
    cause: FailureCause = FailureCause.OTHER


class AnnounceDraining(NodeCommand, frozen=True):
    """Tell the coordinator that this node takes nothing more."""

    reason: str


class DeleteJobState(NodeCommand, frozen=True):
    """Delete what the node keeps for a job."""

    job_id: JobId


class SetTimer(NodeCommand, frozen=True):
    """Report `TimerFired` at this time. It replaces a timer of the same name."""

    timer: Timer
    at_ms: Milliseconds


class Leave(NodeCommand, frozen=True):
    """Close the link in good order, end the worker and exit."""

    departure: Departure
    reason: str
