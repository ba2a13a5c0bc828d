"""What happened to a job: past tense, frozen, stamped by the shell; the journal is their list."""

import msgspec

from coordinator.core.job import BlobRef, DueReceipt, LedgerSays, Model, Update
from coordinator.core.plan.decision import RoundPlan
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.ledger.terms import Terms
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei


class Happened(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every event carries: job time in milliseconds, and whether new work can be paid."""

    at_ms: Milliseconds
    ledger: LedgerSays | None = None
    """What was known when it happened, where it may open a round of a job that pays on a chain."""


class JobCreated(Happened, frozen=True, tag=True):
    """A user asked for the job."""

    job_id: JobId
    spec: JobSpec
    manifest: BlobRef | None = None
    terms: Terms | None = None
    """For whom and where its work counts."""


class ModelInitialised(Happened, frozen=True, tag=True):
    """The evaluator made the first parameters and counted each partition's samples."""

    model: Model
    partition_sizes: tuple[Samples, ...]


class PreparationFailed(Happened, frozen=True, tag=True):
    """The evaluator cannot make the initial model."""

    reason: str


class NodeJoined(Happened, frozen=True, tag=True):
    """A node is there for this job: new, back again, or lent by another job."""

    node: NodeId


class NodeLost(Happened, frozen=True, tag=True):
    """A node was not heard of for too long, or left."""

    node: NodeId
    reason: str


class NodeDraining(Happened, frozen=True, tag=True):
    """A node finishes what it holds and takes nothing more from this job."""

    node: NodeId
    reason: str


class RoundPlanned(Happened, frozen=True, tag=True):
    """The plan that `PlanRound` asked for was made."""

    plan: RoundPlan


class UpdateReceived(Happened, frozen=True, tag=True):
    """An update is complete, checked and durable."""

    node: NodeId
    round: int
    lease: int
    update: Update


class UpdateRefused(Happened, frozen=True, tag=True):
    """The shell refused an update of a known node."""

    node: NodeId
    round: int
    reason: str


class ShardHandedBack(Happened, frozen=True, tag=True):
    """A participant gave its shard back unfinished."""

    node: NodeId
    round: int
    lease: int
    reason: str


class DeadlineReached(Happened, frozen=True, tag=True):
    """The time that `SetDeadline` asked for has come."""

    round: int


class AggregateReady(Happened, frozen=True, tag=True):
    """The closed round's updates were folded into the next model."""

    round: int
    model: Model
    refused: tuple[tuple[NodeId, str], ...] = ()
    """Updates that turned out unreadable on disk, with the reason; they are not in the sum."""
    bytes_down: Bytes = Bytes(0)
    """Model bytes served to nodes since the last aggregate."""
    agreement: float | None = None
    """Of the updates, see `PlanRequest.agreement`; None when it is not known."""
    agreements: dict[NodeId, float] = {}
    """Cosine of each update with the mean of the others; of some it is not known."""


class ModelLost(Happened, frozen=True, tag=True):
    """The current model's bytes are missing or damaged on disk."""

    model: Digest
    reason: str


class EvaluationReady(Happened, frozen=True, tag=True):
    """The held-out set was evaluated with the model of ``round``."""

    round: int
    model: Digest
    loss: float
    metric: float
    metric_name: str


class EvaluationFailed(Happened, frozen=True, tag=True):
    """The evaluator gave up on a model."""

    round: int
    reason: str


class UpdatesJudged(Happened, frozen=True, tag=True):
    """Some updates of a round were measured on held-out data, or that was given up."""

    round: int
    base_loss: float | None = None
    """Of the model that the round started from; None: nothing is known, for this reason."""
    made_loss: float | None = None
    """Of the model that the round made; None when it is not finite."""
    losses: dict[NodeId, float] = {}
    """Of that model with one node's update alone. Whose is not finite is left out."""
    reason: str = ""


class JobPaused(Happened, frozen=True, tag=True):
    """A user asked to pause, or the coordinator cannot go on without one."""

    reason: str = ""
    """Why, when it was the coordinator."""


class JobResumed(Happened, frozen=True, tag=True):
    """A user asked to go on."""


class JobStopped(Happened, frozen=True, tag=True):
    """A user asked to end the job with the model it has."""


class ParametersChanged(Happened, frozen=True, tag=True):
    """A user changed settings; ``spec`` is the whole validated result."""

    spec: JobSpec


class RoundRecorded(Happened, frozen=True, tag=True):
    """The round's figures, for people. The machine writes it and never reads it."""

    round: int
    participants: int
    updates: int
    samples: Samples
    bytes_up: Bytes
    bytes_down: Bytes
    duration_ms: Milliseconds
    loss: float | None
    """Mean of the participants' last training losses, weighted by samples."""
    samples_per_s: float
    reason: str
    """Why the round closed."""
    inner_steps: int = 0
    """The middle of what participants were to take."""
    codecs: dict[str, int] = {}
    """How many participants were to send in which scheme."""
    resting: int = 0
    """Nodes that were there and that the plan gave nothing."""
    forecast_error: float | None = None
    """Mean over participants of how far the forecast was off, over what it took; None without one.
    One that was cut counts with what it had taken by the deadline: it would have taken more.
    """


class MeasuredUpdate(msgspec.Struct, frozen=True):
    """An update whose quality is known: with the coordinator's signature it is a receipt."""

    sequence: int
    quality_bps: BasisPoints
    evaluator: str
    """Short name of what measured the quality."""
    reason: str
    """Why the quality is what it is."""
    due: DueReceipt


class RoundMetered(Happened, frozen=True, tag=True):
    """A round's receipts. The machine writes it and never reads it."""

    round: int
    epoch: int
    updates: tuple[MeasuredUpdate, ...]
    """In slot order."""


class EpochEnded(Happened, frozen=True, tag=True):
    """An epoch takes no more receipts, and this is its pay. The machine never reads it."""

    epoch: int
    is_last: bool
    """No other will come."""
    scores: dict[NodeId, int]
    pool: Wei
    rewards: dict[NodeId, Wei]


NodeEvent = NodeJoined | NodeLost | NodeDraining | UpdateReceived | UpdateRefused | ShardHandedBack
"""What nodes do."""

ControlEvent = JobPaused | JobResumed | JobStopped | ParametersChanged | DeadlineReached
"""What users and the clock do."""

ModelEvent = (
    ModelInitialised
    | PreparationFailed
    | AggregateReady
    | ModelLost
    | EvaluationReady
    | EvaluationFailed
)
"""What the evaluator and the aggregation report."""

Record = RoundRecorded | RoundMetered | EpochEnded
"""What the machine writes and never reads."""

Event = JobCreated | NodeEvent | ControlEvent | ModelEvent | RoundPlanned | UpdatesJudged | Record
