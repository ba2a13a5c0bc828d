"""What the shell is asked to do: imperative, keyed by round and node, safe to perform twice."""

import msgspec

from coordinator.core.events import Record
from coordinator.core.job import Ahead, BlobRef, JudgedUpdate, Model, Shard
from coordinator.core.plan.decision import NodePlan, PlanRequest
from hypergpu.ids import Digest, JobId, NodeId, Slot
from hypergpu.jobfile.spec import JobSpec
from hypergpu.statements.domain import Terms
from hypergpu.units import Milliseconds, Samples


class InitialiseModel(msgspec.Struct, frozen=True):
    """Make the initial parameters; answered by `ModelInitialised` or `PreparationFailed`."""

    job_id: JobId
    spec: JobSpec
    manifest: BlobRef | None


class PlanRound(msgspec.Struct, frozen=True):
    """Plan the next round by what was measured of its nodes; answered by `RoundPlanned`."""

    request: PlanRequest


class AssignShard(msgspec.Struct, frozen=True):
    """Give a participant its work; answered by `UpdateReceived` or `ShardHandedBack`."""

    node: NodeId
    round: int
    lease: int
    slot: Slot
    shard: Shard
    partitions: int
    spec: JobSpec
    manifest: BlobRef | None
    model: Model
    plan: NodePlan
    seed: int
    """Keyed by (job seed, slot, round)."""
    global_samples: Samples
    total_samples: Samples
    deadline_at_ms: Milliseconds
    last_accepted: Digest | None
    reason: str
    epoch: int = 0
    """Number of the epoch that the round is settled in."""
    terms: Terms = Terms()
    begun: Ahead | None = None
    """What the shard begins with, from the node's own end of the round before."""
    ahead: Ahead | None = None
    """What the next round's shard may be begun with when this one is done."""


class CancelShard(msgspec.Struct, frozen=True):
    """Tell a node that its lease is void."""

    node: NodeId
    round: int
    lease: int
    reason: str


class ReleaseNode(msgspec.Struct, frozen=True):
    """The job has no further use for the node: others may have it."""

    node: NodeId
    reason: str


class SetDeadline(msgspec.Struct, frozen=True):
    """Report `DeadlineReached` for the round at this job time."""

    round: int
    at_ms: Milliseconds


class FoldedUpdate(msgspec.Struct, frozen=True):
    """One term of the weighted mean."""

    node: NodeId
    slot: Slot
    blob: BlobRef
    weight: int
    """Against the others; 0 leaves it out."""
    scheme: str


class Aggregate(msgspec.Struct, frozen=True):
    """Fold ``updates``, which are in slot order, into ``base``; answered by `AggregateReady`."""

    round: int
    base: Model
    updates: tuple[FoldedUpdate, ...]
    spec: JobSpec
    down: str
    """Scheme of the delta."""
    is_sparse: bool
    """Whether the outer step is plain SGD, as sparse codecs need it."""
    scale: float = 1.0
    """Multiplies the weighted mean."""


class EvaluateModel(msgspec.Struct, frozen=True):
    """Measure a model on the held-out set; answered by `EvaluationReady` or `EvaluationFailed`."""

    round: int
    model: Model
    spec: JobSpec
    manifest: BlobRef | None


class JudgeUpdates(msgspec.Struct, frozen=True):
    """Measure ``base``, ``made``, and ``base`` with each of these updates alone on held-out data;
    answered by `UpdatesJudged`.
    """

    round: int
    base: BlobRef
    made: BlobRef
    updates: tuple[JudgedUpdate, ...]
    spec: JobSpec
    manifest: BlobRef | None


class WriteRecord(msgspec.Struct, frozen=True):
    """Journal a record together with the event that led to it."""

    record: Record


Command = (
    InitialiseModel
    | PlanRound
    | AssignShard
    | CancelShard
    | ReleaseNode
    | SetDeadline
    | Aggregate
    | EvaluateModel
    | JudgeUpdates
    | WriteRecord
)
