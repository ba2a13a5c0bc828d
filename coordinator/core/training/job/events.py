"""What happened to a job: past tense, frozen, stamped by the shell; the journal is their list."""

import msgspec

from coordinator.core.training.job.state import AcceptedUpdate, InitialWeights, Model
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.plan.decision import RoundPlan
from coordinator.core.work.funding import Funding
from coordinator.core.work.work_events import (
    CoordinatorChanged,
    FundingChanged,
    JobEnded,
    JobPaused,
    JobResumed,
    JobStopped,
    MembershipEvent,
    StampedEvent,
)
from hypergpu.blobs import BlobRef
from hypergpu.experts import Mixture
from hypergpu.ids import Digest, JobId, NodeId, TokenId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.ledger_terms import Terms
from hypergpu.statements import Contribution
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples
from hypergpu.workloads.entry import HeldOutExample


class JobCreated(StampedEvent, frozen=True, tag=True):
    """A user asked for the job."""

    job_id: JobId
    spec: JobSpec
    manifest: BlobRef | None = None
    weights: InitialWeights | None = None
    terms: Terms = Terms()
    """For whom and on which ledger its work is signed."""
    owner: TokenId = TokenId("")
    """Token whose holder created the job."""
    funding: Funding | None = None
    """Funding at the start; None: nothing limits the job's work."""
    judges_own_samples: bool = False
    """Whether its updates are judged by samples of their own shards; False: as in jobs of versions
    that had no such rule.
    """
    tries_updates: bool = False
    """Whether pay is judged by trials of updates on samples of their own shards, too."""
    counts_looks: bool = False
    """Whether a look at a node's samples counts for the rounds since the last one."""
    use_least: int = 0
    """See `TrustMemory.use_least`."""


class ModelInitialised(StampedEvent, frozen=True, tag=True):
    """The evaluator made the first parameters and counted each partition's samples."""

    model: Model
    partition_sizes: tuple[Samples, ...]
    layout: Digest = Digest("")
    """Digest of the layout of the job's models."""
    workload_version: int = 1
    can_checkpoint: bool = False
    """See `WorkloadEntry`."""
    operators: tuple[str, ...] = ()
    """Operators of torch without which no node can train it."""
    examples: tuple[HeldOutExample, ...] = ()
    """Held-out samples for which each evaluation tells the model's output. For people."""
    target_mode: str = ""
    """``min`` or ``max``: whether the metric falls or rises to a target; empty: as jobs of older
    versions have it.
    """
    is_evaluated: bool = False
    """Whether this model is evaluated, before any training; older versions did not."""
    notes: tuple[str, ...] = ()
    """What a user should know of how data and model are used."""
    mixture: Mixture | msgspec.UnsetType = msgspec.UNSET
    """The experts of the model, where it is a mixture; unset, it is left out."""


class PreparationFailed(StampedEvent, frozen=True, tag=True):
    """The evaluator cannot make the initial model."""

    reason: str


class RoundPlanned(StampedEvent, frozen=True, tag=True):
    """The plan that `PlanRound` asked for was made."""

    plan: RoundPlan


class UpdateReceived(StampedEvent, frozen=True, tag=True):
    """An update is complete, checked and durable."""

    node: NodeId
    round: int
    lease: int
    update: AcceptedUpdate


class UpdateRejected(StampedEvent, frozen=True, tag=True):
    """The shell rejected an update of a known node."""

    node: NodeId
    round: int
    reason: str


class ShardHandedBack(StampedEvent, frozen=True, tag=True):
    """A participant gave its shard back unfinished."""

    node: NodeId
    round: int
    lease: int
    reason: str
    lacks_memory: bool = False
    """Whether its batch did not fit into the memory of the node's device, so that it is tried again
    with less at once. Rows from before it was tried again have another key, which replay ignores.
    """


class DeadlineReached(StampedEvent, frozen=True, tag=True):
    """The time that `SetDeadline` asked for has come."""

    round: int


class AggregateReady(StampedEvent, frozen=True, tag=True):
    """The closed round's updates were folded into the next model."""

    round: int
    model: Model
    omitted: tuple[tuple[NodeId, str], ...] = ()
    """Updates that turned out unreadable on disk, with the reason; they are not in the sum."""
    bytes_down: Bytes = Bytes(0)
    """Model bytes served to nodes since the last aggregate."""
    agreement: float | None = None
    """Agreement of the updates, see `PlanRequest.agreement`; None when it is not known."""
    weighing: Weighing | None = None
    """How much each update counted; None where no model was made of them."""
    draw: str = ""
    """Draw of the next round's duplicates, from a secret; empty: it has none."""


class ModelLost(StampedEvent, frozen=True, tag=True):
    """The current model's bytes are missing or damaged on disk."""

    model: Digest
    reason: str


class EvaluationReady(StampedEvent, frozen=True, tag=True):
    """The held-out set was evaluated with the model of ``round``."""

    round: int
    model: Digest
    loss: float
    metric: float
    metric_name: str
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Further metrics by name."""
    outputs: tuple[str, ...] = ()
    """The model's output for each of the job's examples, 400 bytes together. For people."""
    samples: int = 0
    """Held-out samples that were measured; 0: not told."""
    samples_all: int = 0
    """Held-out samples that there are."""


class EvaluationFailed(StampedEvent, frozen=True, tag=True):
    """The evaluator gave up on a model."""

    round: int
    reason: str


class ParametersChanged(StampedEvent, frozen=True, tag=True):
    """A user changed settings; ``spec`` is the whole validated result."""

    spec: JobSpec


class MemoryFitted(StampedEvent, frozen=True, tag=True):
    """A participant ran out of memory and takes its shard again, with less in memory at once."""

    node: NodeId
    round: int
    micro_batch: int
    checkpoints_activations: bool
    reason: str


class RoundRecorded(StampedEvent, frozen=True, tag=True):
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
    """Median number of the participants' inner steps."""
    codecs: dict[str, int] = msgspec.field(default_factory=dict)
    """How many participants were to send in which codec."""
    resting: int = 0
    """Nodes that were there and that the plan gave nothing."""
    forecast_error: float | None = None
    """Mean over participants of how far the forecast was off, over what it took; None without one.
    One that was cut counts with what it had taken by the deadline: it would have taken more.
    """
    updates_needed: int = 0
    """Quorum that it closed with; 0: not told."""


class MeasuredUpdate(msgspec.Struct, frozen=True):
    """An accepted update whose quality is final."""

    contribution: Contribution
    signature: bytes
    """The node's signature of the contribution."""
    quality_bps: BasisPoints
    evaluator: str
    """Short name of the rule and the measurements behind the quality."""
    reason: str
    """Why the quality is what it is."""


class RoundMeasured(StampedEvent, frozen=True, tag=True):
    """The quality of a round's updates is final. The machine writes it and never reads it.

    Rounds follow each other in ascending order, each once. Payments are a fold of these.
    """

    round: int
    updates: tuple[MeasuredUpdate, ...]
    """In slot order."""


_NodeEvent = MembershipEvent | UpdateReceived | UpdateRejected | ShardHandedBack
"""What nodes do, and what is done to them."""

ControlEvent = (
    JobPaused
    | JobResumed
    | JobStopped
    | ParametersChanged
    | FundingChanged
    | DeadlineReached
    | CoordinatorChanged
)
"""What users, payments, the clock and a start of the coordinator do."""

ModelEvent = (
    ModelInitialised
    | PreparationFailed
    | AggregateReady
    | ModelLost
    | EvaluationReady
    | EvaluationFailed
)
"""What the evaluator and the aggregation report."""

Record = MemoryFitted | RoundRecorded | RoundMeasured | JobEnded
"""What the machine writes about its own steps: no step follows from it."""

PaymentEvent = JobCreated | ModelInitialised | ParametersChanged | RoundMeasured | JobEnded
"""What payments fold: nothing else wakes them."""

Event = JobCreated | _NodeEvent | ControlEvent | ModelEvent | RoundPlanned | Record
