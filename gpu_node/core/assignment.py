"""What the coordinator asks of a node, as plain values."""

import msgspec

from hypergpu.ids import Digest, JobId, Slot
from hypergpu.statements.domain import Terms
from hypergpu.units import Bytes, Milliseconds, Samples


class Lease(msgspec.Struct, frozen=True):
    """Names one assignment. ``number`` is a fencing token: a participant's newest counts."""

    job_id: JobId
    round: int
    number: int


class BlobRef(msgspec.Struct, frozen=True):
    """A blob that can be fetched by digest."""

    digest: Digest
    size_bytes: Bytes


class Delta(msgspec.Struct, frozen=True):
    """A compressed difference: the model ``base`` plus it is the next model."""

    base: Digest
    blob: BlobRef
    scheme: str


class InitialModel(msgspec.Struct, frozen=True):
    """A job's first model: it follows from the workload, its options and ``seed``."""

    digest: Digest
    seed: int


class SampleRange(msgspec.Struct, frozen=True):
    """Positions [start, start + count) of the partition's endless stream."""

    start: int
    count: Samples


class Ahead(msgspec.Struct, frozen=True):
    """Inner steps of a round that start from this node's own end of the round before, so that they
    can be taken while that one's update is on its way.
    """

    round: int
    """Whose shard they are the beginning of."""
    inner_steps: int
    ranges: tuple[SampleRange, ...]
    seed: int
    global_samples: Samples = Samples(0)
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
    """Of this node."""
    stated_batch_size: int = 0
    """As the job file has it; 0: the same."""
    learning_rate: float
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    codec: str
    seed: int
    global_samples: Samples = Samples(0)
    total_samples: Samples = Samples(0)
    partition: int = 0
    partitions: int = 1
    skew_alpha: float = 0.0
    data_seed: int = 0
    ranges: tuple[SampleRange, ...]
    model: BlobRef
    layout: Digest
    manifest: BlobRef | None = None
    begun: Ahead | None = None
    """What the shard begins with; without the end state of the round before nothing."""

    @property
    def full_steps(self) -> float:
        """Inner steps, counted in steps of the job's own batch."""
        return self.inner_steps * self.batch_size / (self.stated_batch_size or self.batch_size)


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
    """To move the model and the update over."""
    terms: Terms = Terms()
    """For whom and where the work counts; of no other say in what is done."""
    epoch: int = 0
    """Of the round: what is settled together."""
    ahead: Ahead | None = None
    """What the next round's shard may be begun with when this one is done."""
    reason: str = ""


class Update(msgspec.Struct, frozen=True):
    """A finished update, by name, and what the node says of its making."""

    digest: Digest
    size_bytes: Bytes
    inner_steps: int
    samples: Samples
    compute_ms: Milliseconds = Milliseconds(0)
    loss_first: float | None = None
    """None when it is not finite."""
    loss_last: float | None = None
