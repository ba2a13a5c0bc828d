"""What the shell is asked to do: imperative, keyed by round and node, safe to perform twice."""

import msgspec

from coordinator.core.training.job.state import InitialWeights, Model
from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.plan.decision import PlanRequest
from coordinator.core.work.work_commands import ReleaseNode, WriteRecord
from hypergpu.assignment import Assignment, SampleRange
from hypergpu.blobs import BlobRef
from hypergpu.experts import Mixture
from hypergpu.ids import JobId, NodeId, Slot
from hypergpu.jobfile.spec import JobSpec, Outer
from hypergpu.units import Milliseconds


class InitialiseModel(msgspec.Struct, frozen=True):
    """Make the initial parameters; answered by `ModelInitialised` or `PreparationFailed`."""

    job_id: JobId
    spec: JobSpec
    manifest: BlobRef | None
    weights: InitialWeights | None


class PlanRound(msgspec.Struct, frozen=True):
    """Plan the next round by what was measured of its nodes; answered by `RoundPlanned`."""

    request: PlanRequest


class AssignShard(msgspec.Struct, frozen=True):
    """Give a participant its work; answered by `UpdateReceived` or `ShardHandedBack`."""

    node: NodeId
    assignment: Assignment
    """The work, without its ``deadline_in_ms``, which depends on when it is sent."""
    deadline_at_ms: Milliseconds
    """Deadline of the round in job time; 0: none."""

    def assignment_at(self, now_ms: Milliseconds) -> Assignment:
        """The assignment as it is sent at ``now_ms``: clocks of two machines are never compared."""
        if not self.deadline_at_ms:
            return self.assignment
        left_ms = Milliseconds(max(1, self.deadline_at_ms - now_ms))
        return msgspec.structs.replace(self.assignment, deadline_in_ms=left_ms)


class CancelShard(msgspec.Struct, frozen=True):
    """Tell a node that its lease is void."""

    node: NodeId
    round: int
    lease: int
    reason: str


class SetDeadline(msgspec.Struct, frozen=True):
    """Report `DeadlineReached` for the round at this job time."""

    round: int
    at_ms: Milliseconds


class OwnShard(msgspec.Struct, frozen=True):
    """The shard that an update was made of, and the model that it was made from."""

    lease: int
    partition: int
    ranges: tuple[SampleRange, ...]
    base: BlobRef


class FoldedUpdate(msgspec.Struct, frozen=True):
    """One term of the weighted mean."""

    node: NodeId
    slot: Slot
    blob: BlobRef
    weight: int
    """Against the others; 0 leaves it out."""
    codec: str
    inner_steps: int
    clip: int = 65_536
    """What it is multiplied by besides, in 1/65,536."""
    full_weight: int = 0
    """Its weight if it had a full vote; 0: the same."""
    experts: tuple[int, ...] = ()
    """Experts that it covers, beside what all share; none: it covers everything."""
    own: OwnShard | None = None
    """None: the samples are its node's own, and not to be had."""


class DuplicatedShards(msgspec.Struct, frozen=True):
    """Shards that two nodes of a round had each, see `trust.duplicates`."""

    pairs: dict[NodeId, NodeId] = {}
    """Nodes that had the shard of another, with that one."""
    incomparable: frozenset[NodeId] = frozenset()
    """Those of them that trained it in other passes than that one."""
    slow: frozenset[NodeId] = frozenset()
    """Nodes of the pairs that were slower than they say, whether their updates are in or not."""
    timed: frozenset[NodeId] = frozenset()
    """Nodes of the pairs that had to be in sooner than usual."""
    earlier: dict[NodeId, FoldedUpdate] = {}
    """Updates of the shards of nodes with leases over several rounds that other nodes made in an
    earlier round; they are compared and not folded again.
    """


class Aggregate(msgspec.Struct, frozen=True):
    """Fold ``updates``, which are in slot order, into ``base``; answered by `AggregateReady`."""

    round: int
    base: Model
    updates: tuple[FoldedUpdate, ...]
    spec: JobSpec
    down: str
    """Codec of the delta."""
    outer: Outer
    """The outer step to take."""
    outer_reason: str
    trust: TrustMemory
    weighing: Weighing | None
    """Weighing of these updates, where they were folded before; None: they are to be weighed."""
    manifest: BlobRef | None
    scale: float = 1.0
    """Multiplies the weighted mean."""
    fallback: Model | None = None
    """The model before ``base``, to go back to where ``base`` is of no use; None: ``base`` is the
    first one, or the job went back to it.
    """
    duplicates: DuplicatedShards = DuplicatedShards()
    mixture: Mixture | None = None
    """The experts of the model; None: it is no mixture."""
    makers: tuple["FoldedUpdate", ...] = ()
    """Updates that ``base`` was made of."""


class EvaluateModel(msgspec.Struct, frozen=True):
    """Measure a model on the held-out set; answered by `EvaluationReady` or `EvaluationFailed`."""

    round: int
    model: Model
    spec: JobSpec
    manifest: BlobRef | None
    samples_most: int = 0
    """Held-out samples to measure, always the same ones; 0: all."""


Command = (
    InitialiseModel
    | PlanRound
    | AssignShard
    | CancelShard
    | ReleaseNode
    | SetDeadline
    | Aggregate
    | EvaluateModel
    | WriteRecord
)
