"""What the shell is asked to do: imperative, keyed by lease, safe to perform twice."""

from enum import Enum

import msgspec

from gpu_node.core.events import Timer
from gpu_node.core.memory import Start
from gpu_node.core.update import Update
from hypergpu.ids import JobId
from hypergpu.statements.assignment import Assignment, Lease
from hypergpu.units import Milliseconds


class Departure(Enum):
    """How a daemon ends."""

    DRAINED = "drained"
    STOPPED = "stopped"
    REFUSED = "refused"


class Join(msgspec.Struct, frozen=True):
    """Trade the token for a certificate; answered by `Joined`, `JoinFailed` or `JoinRefused`."""


class OpenLink(msgspec.Struct, frozen=True):
    """Dial and open the control stream; answered by `Connected`, `LinkLost` or `LinkRefused`."""

    working: tuple[Lease, ...]
    """What the hello names as still being worked on."""


class FetchInputs(msgspec.Struct, frozen=True):
    """Bring the model and the data; answered by `InputsFetched`, `FetchBroken` or `FetchRefused`.

    Nothing happens when that is under way for this lease already.
    """

    assignment: Assignment


class StopFetch(msgspec.Struct, frozen=True):
    """Stop bringing a lease's inputs. What came stays cached."""

    lease: Lease


class Train(msgspec.Struct, frozen=True):
    """Train; answered by `TrainingFinished`, `TrainingFailed`, `TrainingAborted`, `WorkerDied`."""

    assignment: Assignment
    start: Start
    keeps: tuple[int, ...]
    """Rounds whose end states matter. Any other on disk was never finished and goes first."""


class AbortTraining(msgspec.Struct, frozen=True):
    """Tell the worker to drop a shard, and end it should it not answer."""

    lease: Lease


class StartWorker(msgspec.Struct, frozen=True):
    """Start the worker without work; answered by `WorkerReady` or `WorkerDied`."""


class EndWorker(msgspec.Struct, frozen=True):
    """End the worker process at once; answered by `WorkerDied`."""

    reason: str


class Upload(msgspec.Struct, frozen=True):
    """Send an update; answered by `UpdateAccepted`, `UpdateLate`, `UpdateRefused`, `UploadBroken`.

    Nothing happens when that is under way for this lease already.
    """

    assignment: Assignment
    """What it was made for, under the newest lease."""
    update: Update


class StopUpload(msgspec.Struct, frozen=True):
    """Stop sending a lease's update."""

    lease: Lease


class HandBack(msgspec.Struct, frozen=True):
    """Tell the coordinator that a lease's work will not be done."""

    lease: Lease
    reason: str


class AnnounceDraining(msgspec.Struct, frozen=True):
    """Tell the coordinator that this node takes nothing more."""

    reason: str


class DeleteJobState(msgspec.Struct, frozen=True):
    """Delete what the node keeps for a job."""

    job_id: JobId


class SetTimer(msgspec.Struct, frozen=True):
    """Report `TimerFired` at this time. It replaces one of the same name."""

    timer: Timer
    at_ms: Milliseconds


class Leave(msgspec.Struct, frozen=True):
    """Close the link in good order, end the worker and exit."""

    departure: Departure
    reason: str


Command = (
    Join
    | OpenLink
    | FetchInputs
    | StopFetch
    | Train
    | AbortTraining
    | StartWorker
    | EndWorker
    | Upload
    | StopUpload
    | HandBack
    | AnnounceDraining
    | DeleteJobState
    | SetTimer
    | Leave
)
