"""Assignments of work under leases."""

from enum import Enum

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.ledger_terms import Terms
from hypergpu.optimizer import OptimizerRule
from hypergpu.packed_work import PackedWork
from hypergpu.signed_spec import SignedSpec
from hypergpu.units import Milliseconds, Samples

LEASE_ROUNDS_MOST = 16
"""Rounds that the work under one lease may take."""


class Lease(msgspec.Struct, frozen=True):
    """Names one assignment. ``number`` is a fencing token: a participant's newest counts."""

    job_id: JobId
    round: int
    number: int


class FailureCause(Enum):
    """Why a node cannot do a piece of work, as far as anything is decided by it."""

    OTHER = "other"
    OUT_OF_MEMORY = "out of memory"
    """The work took all memory, or more than the node's owner allows."""
    OWNER = "owner"
    """Another limit of the node's owner, or the owner's data."""

    @property
    def is_lasting(self) -> bool:
        """Whether the same work on the same node would fail again."""
        return self is not FailureCause.OTHER


class Delta(msgspec.Struct, frozen=True):
    """A compressed difference: the model ``base`` plus it is the next model."""

    base: Digest
    blob: BlobRef
    codec: str


class InitialModel(msgspec.Struct, frozen=True):
    """A job's first model: it follows from the workload, its options and ``seed``."""

    digest: Digest
    seed: int


class SampleRange(msgspec.Struct, frozen=True):
    """Positions [start, start + count) of a partition's endless sample stream."""

    start: int
    count: Samples


class Prefetch(msgspec.Struct, frozen=True):
    """Inner steps of a round that a node takes from its own end of the round before, while that
    round's updates travel.

    Everything that decides them is stated with the round before: a node that has to take them again
    takes the same.
    """

    round: int
    """The round that they are the first steps of."""
    inner_steps: int
    ranges: tuple[SampleRange, ...]
    """The beginning of the node's shard in that round."""
    seed: int
    global_samples: Samples = Samples(0)
    """Index of schedules: as if the round before were done."""
    total_samples: Samples = Samples(0)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the update's bytes, besides the end state that training starts from.

    Two assignments of one round with equal tasks have the same update, whatever their leases.
    """

    workload: str
    workload_version: int
    options: dict[str, str | int | float | bool] = {}
    inner_steps: int
    batch_size: int
    """Samples in an inner step of this node."""
    stated_batch_size: int = 0
    """As the job file has it; 0: the same."""
    learning_rate: float
    optimizer: OptimizerRule = OptimizerRule()
    warmup_steps: int = 0
    schedule: str = "constant"
    """One of `hypergpu.optimizer.SCHEDULES`."""
    codec: str
    """Codec of the update."""
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
    ranges: tuple[SampleRange, ...]
    model: BlobRef
    layout: Digest
    manifest: BlobRef | None = None
    """The user's files; None for the workload's own data."""
    data_name: str = ""
    """The data set of the node's own that its owner must have named a folder for; empty: none."""
    experts: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """Experts of the mixture that the model and the update have, beside what all share. Unset, they
    have all, and tasks are named as by versions that had no experts.
    """
    prefetched: Prefetch | None = None
    """The first steps of the shard; without the end state of the round before they are steps like
    all others.
    """

    @property
    def full_steps(self) -> float:
        """Inner steps, counted in steps of the job's own batch."""
        return self.inner_steps * self.batch_size / self.usual_batch_size

    @property
    def usual_batch_size(self) -> int:
        """Samples in an inner step of the job, whatever they are on this node."""
        return self.stated_batch_size or self.batch_size

    @property
    def samples(self) -> Samples:
        """Samples of the shard."""
        return Samples(sum(run.count for run in self.ranges))


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work: a shard of one round of one job, under a lease."""

    lease: Lease
    slot: Slot
    task: Task
    deltas: tuple[Delta, ...] = ()
    """Newest last: each leads to the base of the next, the last one to the assigned model."""
    initial: InitialModel | None = None
    """The job's first model, where the assigned one is it or ``deltas`` lead on from it."""
    last_accepted: Digest | None = None
    """The newest update of this node that the coordinator accepted in this job."""
    deadline_in_ms: Milliseconds = Milliseconds(0)
    """Time left when it was sent until the round closes regardless; 0: none."""
    upload_after_ms: Milliseconds = Milliseconds(0)
    """How long a finished update waits, so that all nodes' uploads do not begin at once."""
    connections: int = 1
    """Connections to move the model and the update over."""
    terms: Terms = Terms()
    """For whom and on which ledger the work is signed; the training does not depend on it."""
    epoch: int = 0
    """Number of the epoch that the round is settled in."""
    prefetch: Prefetch | None = None
    """First steps of the next round, to take once this one's update is out."""
    reason: str = ""
    judgement: str = ""
    """How the node's newest update of the job counts and is paid, where that is not in full."""

    @property
    def newest_blob(self) -> BlobRef:
        """Blob that a node with the model before lacks: the newest delta, or the whole model."""
        return self.deltas[-1].blob if self.deltas else self.task.model


INPUTS_MOST = 64
"""Blobs that packed work needs at most."""


class PackedAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work of a kind other than training, under a lease."""

    lease: Lease
    slot: Slot
    work: PackedWork
    inputs: tuple[BlobRef, ...] = ()
    """Blobs that the work needs, fetched before it begins."""
    terms: Terms | None = None
    """For whom and on which ledger the result is signed; None: it is not."""
    spec: SignedSpec | None = None
    """What the user signed of the work; None: nothing."""
    content_bytes_most: int = 0
    """Size of a result's blob that may travel beside the result; 0: it is sent by a ticket."""
    after_lease: int = 0
    """Number of the lease of the same job whose work comes first; 0: it is begun at once, and what
    the node has of the job is void.
    """
    reason: str = ""


AnyAssignment = Assignment | PackedAssignment
"""One piece of work of any kind, under a lease."""


def is_same_work(one: AnyAssignment, other: AnyAssignment) -> bool:
    """Whether two assignments ask for the same, whatever their leases and reasons."""
    if isinstance(one, Assignment):
        return isinstance(other, Assignment) and one.task == other.task
    return isinstance(other, PackedAssignment) and one.work == other.work
