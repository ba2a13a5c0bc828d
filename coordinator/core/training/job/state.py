"""The state of one job: what the round machine knows, and the blobs that it still needs.

Frozen, serializable, without tensors.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.plan.decision import MemoryFit, MemoryUse, NodePlan, PlanMemory
from coordinator.core.work.leases import LeasedWork, WorkState
from coordinator.core.work.members import JobMember, LeasedJob
from coordinator.core.work.pairs import partner
from hypergpu.assignment import Delta, Prefetch, SampleRange
from hypergpu.blobs import BlobRef
from hypergpu.experts import Mixture
from hypergpu.ids import Digest, NodeId, Slot
from hypergpu.jobfile.spec import JobSpec
from hypergpu.ledger_terms import Terms
from hypergpu.phases import PhaseDurations
from hypergpu.units import Bytes, Milliseconds, Samples


class Phase(Enum):
    """Where a job is."""

    PREPARING = "preparing"  # the evaluator makes the initial model
    WAITING = "waiting"  # a model is there, the stated number of nodes is not
    PLANNING = "planning"  # enough nodes are there, the next round's plan is being made
    TRAINING = "training"  # a round is open
    AGGREGATING = "aggregating"  # a round is closed, its updates are being folded
    PAUSED = "paused"
    FINISHING = "finishing"  # all rounds done, the last evaluation is under way
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.FAILED})


class ModelPart(msgspec.Struct, frozen=True):
    """The part of a mixture's model that holders of these experts have: the tensors of the experts,
    and those that all share.
    """

    experts: tuple[int, ...]
    layout: Digest
    blob: BlobRef
    deltas: tuple[Delta, ...] = ()
    """As in `Model`; each part has a chain of its own."""


class Model(msgspec.Struct, frozen=True):
    """The parameters after ``round`` rounds, as nodes hold them, and what is kept beside them."""

    round: int
    blob: BlobRef
    outer_state: BlobRef | None = None
    """The coordinator's exact parameters and outer momentum; None before the first outer step."""
    deltas: tuple[Delta, ...] = ()
    """Newest last: each leads to the base of the next, the last one to this model."""
    parts: tuple[ModelPart, ...] | msgspec.UnsetType = msgspec.UNSET
    """Where nodes hold some experts of a mixture only: what they hold in place of the whole. Unset,
    it is left out of journals, as by versions that had no parts.
    """

    @property
    def held_parts(self) -> tuple[ModelPart, ...]:
        """Parts that nodes hold; none where they hold the whole."""
        return () if self.parts is msgspec.UNSET else self.parts

    def part(self, experts: tuple[int, ...]) -> ModelPart | None:
        """The part with these experts; None: there is none."""
        return next((each for each in self.held_parts if each.experts == experts), None)

    @property
    def newest_blobs(self) -> tuple[BlobRef, ...]:
        """Blobs that the fold which made this model makes again: of its deltas, the newest."""
        newest = self.deltas[-1].blob if self.deltas else None
        own = tuple(each for each in (self.blob, self.outer_state, newest) if each is not None)
        newest_deltas = (each.deltas[-1].blob for each in self.held_parts if each.deltas)
        return (*own, *(each.blob for each in self.held_parts), *newest_deltas)


class Shard(msgspec.Struct, frozen=True):
    """What one participant trains on in one round."""

    partition: int
    ranges: tuple[SampleRange, ...]


class Stream(msgspec.Struct, frozen=True):
    """A partition's stream: ``cursor`` is the first position never assigned; ``returned`` are
    positions that were assigned but not accepted and go out first.
    """

    size: Samples
    cursor: int = 0
    returned: tuple[SampleRange, ...] = ()


class AcceptedUpdate(msgspec.Struct, frozen=True):
    """An accepted update: where it lies and what its sender says of it."""

    blob: BlobRef
    samples: Samples  # as assigned, not as reported
    inner_steps: int
    compute_ms: Milliseconds = Milliseconds(0)
    loss_last: float | None = None
    """The sender's last training loss; None when it is not finite."""
    codec: str = ""
    """The codec that it was assigned, and checked against when it came."""
    nonce: int = 0
    signature: bytes = b""
    """The node's signature of the contribution."""
    epoch: int | None = None
    """Epoch that its node signed for; None: the one that its lease began in."""
    memory: MemoryUse | None = None
    """The sender's measure: before its first step, and at its peak; None: there is none."""
    phases: PhaseDurations | None = None
    """The sender's report, with the upload until it was in; None: there is none."""
    data_samples: Samples = Samples(0)
    """How many samples of its own the sender says it has; 0: the job's data are everybody's."""


class LeaseBase(msgspec.Struct, frozen=True):
    """What a lease over several rounds was given out with: later rounds change nothing of it."""

    round: int
    """Round that opened with it, from 0."""
    last_round: int
    """The last round that may fold its update; the lease is void once that has closed."""
    spec: JobSpec
    model: Model
    """Model that its steps begin from."""
    base_samples: Samples
    total_samples: Samples
    """Both as of the round that opened with it, see `Round`."""

    @property
    def epoch(self) -> int:
        """Number of the epoch that it began in, which its node signs for first."""
        return self.round // self.spec.pay.rounds_per_epoch


class EarlierDuplicate(msgspec.Struct, frozen=True):
    """Another node's earlier update of the shard of a lease over several rounds."""

    node: NodeId
    slot: Slot
    update: AcceptedUpdate


class Participant(LeasedWork, frozen=True):
    """A node assigned in this round."""

    shard: Shard
    plan: NodePlan
    prefetched: Prefetch | None = None
    """First steps of its shard that it could take in the round before."""
    update: AcceptedUpdate | None = None
    seed_slot: Slot | None = None
    """Slot that its seed follows from, where its shard is another's; None: its own."""
    base: LeaseBase | None = None
    """What a lease over several rounds began with; None: its lease ends with its round."""
    repeats: NodeId | None = None
    """The node whose shard, under a lease over several rounds, it does in secret; None: nobody."""
    duplicate: EarlierDuplicate | None = None
    experts: tuple[int, ...] = ()
    """Experts of the mixture that it trains; none: all."""

    @property
    def inner_steps(self) -> int:
        """Inner steps it takes (H)."""
        return self.plan.inner_steps

    @property
    def codec(self) -> str:
        """The codec that its update travels in."""
        return self.plan.codec


class Round(msgspec.Struct, frozen=True):
    """The open or closing round. ``number`` counts from 0."""

    number: int
    spec: JobSpec
    """The settings it was opened with."""
    base_samples: Samples
    """Samples the job had processed when the round opened."""
    total_samples: Samples
    """What the whole job will have processed if the rounds to come are like this one."""
    opened_at_ms: Milliseconds
    participants: Mapping[NodeId, Participant]
    counts: dict[WorkState, int]
    """How many participants are where, kept beside them: an update costs no walk over all."""
    inner_steps: int
    """Median number of its participants' inner steps."""
    down: str
    """Codec of the delta that it ends with."""
    is_sparse: bool  # its outer step is plain SGD, as sparse codecs need it
    resting: dict[NodeId, str] = {}
    """Nodes that were there and that its plan gave nothing, with the reason."""
    agreement: float | None = None
    """Agreement of its updates, once they are folded; see `PlanRequest.agreement`."""
    weighing: Weighing | None = None
    """How much its updates counted, once they are folded."""
    deadline_at_ms: Milliseconds = Milliseconds(0)  # 0: none
    is_overdue: bool = False
    """The deadline has passed: the round closes as soon as its quorum is there."""
    timer_at_ms: Milliseconds = Milliseconds(0)
    """When the round looks again who is late; 0: not before something happens."""
    trial_until_ms: Milliseconds = Milliseconds(0)
    """How long it waits for those on trial, once it waits for nobody else; 0: it does not yet."""
    longest_ms: Milliseconds = Milliseconds(0)
    """The longest time that one of its updates took; 0: none is in."""
    duplicates: dict[NodeId, NodeId] = {}
    """Who has the shard of whom, of the pairs that are both at work or in."""
    slow: frozenset[NodeId] = frozenset()  # of the pairs: slower than they say, as it closed
    is_interrupted: bool = False  # by a pause or a restart: elapsed times say nothing of nodes
    dealt: int = 0  # shards, as it opened; 0: not known
    orphans: tuple[Shard, ...] = ()  # their participant is gone, and nobody has taken them over
    updates_needed: int = 0  # quorum that it closed with; 0: it is open, or not known

    @property
    def epoch(self) -> int:
        """Number of the epoch that the round is settled in."""
        return self.number // self.spec.pay.rounds_per_epoch

    def partner(self, node: NodeId) -> NodeId | None:
        """Who else has the node's shard; None: nobody."""
        return partner(self.duplicates, node)

    def is_covered(self, node: NodeId) -> bool:
        """Whether another update of the node's shard is in."""
        other = self.partner(node)
        return other is not None and self.participants[other].work is WorkState.RECEIVED

    @property
    def pending(self) -> dict[NodeId, Participant]:
        """Participants whose updates may still come in."""
        return {
            node: participant
            for node, participant in self.participants.items()
            if participant.is_open
        }

    @property
    def accepted_updates(self) -> list[tuple[NodeId, Participant, AcceptedUpdate]]:
        """Participants whose updates are in, in slot order."""
        received_updates = [
            (node, participant, participant.update)
            for node, participant in self.participants.items()
            if participant.work is WorkState.RECEIVED and participant.update is not None
        ]
        return sorted(received_updates, key=lambda each: each[1].slot)


class Member(JobMember, frozen=True):
    """A member of a training, with what its updates have taught of it."""

    last_accepted: Digest | None = None
    accepted_lease: int = 0
    """The lease of ``last_accepted``: two updates may have the same bytes, never the same lease."""
    prefetch: Prefetch | None = None
    """First steps of the next round: they become the beginning of its shard or go back into the
    stream.
    """
    judgement: str = ""
    """How its newest update that was weighed counts and is paid, with the reason; empty: in full.
    """
    useless: int = 0
    """Updates of it in a row that spoke clearly against it."""
    memory_bytes: Bytes = Bytes(0)
    """Its device's, as it says; 0: not known."""
    experts: tuple[int, ...] = ()
    """Experts of the mixture that it holds; none: all, or none yet."""
    fit: MemoryFit = MemoryFit()
    """What running out of memory has taught of its device."""

    @property
    def exclusion(self) -> str:
        """Why the node gets no work of this job while it is there; empty: it does."""
        return self.ban or self.fit.shortage


class Tally(msgspec.Struct, frozen=True):
    """Sums over the job so far."""

    samples: Samples = Samples(0)
    bytes_up: Bytes = Bytes(0)
    bytes_down: Bytes = Bytes(0)
    samples_twice: Samples = Samples(0)
    """Samples of duplicates, which are paid and not in ``samples``."""
    updates_accepted: int = 0
    updates_rejected: int = 0


class ModelScore(msgspec.Struct, frozen=True):
    """One evaluation of one model on the held-out set."""

    round: int
    model: Digest
    loss: float
    metric: float
    metric_name: str = ""
    metrics: dict[str, float] = {}
    samples: int = 0
    """Held-out samples that were measured; 0: not told."""


class InitialWeights(msgspec.Struct, frozen=True):
    """Weights that a job begins with, in place of those that its workload draws."""

    blob: BlobRef
    layout: Digest = Digest("")
    """Layout of the model that the blob is; empty: it is a safetensors file."""


class Job(LeasedJob, frozen=True, kw_only=True):
    """One training run."""

    spec: JobSpec
    manifest: BlobRef | None = None
    weights: InitialWeights | None = None
    """Weights it begins with; None: its workload draws them."""
    terms: Terms = Terms()
    """For whom and on which ledger its work is signed."""
    phase: Phase = Phase.PREPARING
    reason: str = "the initial model is being made"
    next_spec: JobSpec | None = None
    """Changed settings that the next round takes over."""
    resume_to: Phase | None = None
    """While paused: the phase that a resume returns to."""
    paused_at_ms: Milliseconds = Milliseconds(0)
    model: Model | None = None
    layout: Digest = Digest("")
    """Digest of the layout of the job's models; empty before the first one."""
    workload_version: int = 1
    can_checkpoint: bool = False
    """Whether its workload can compute activations again, rather than keep them."""
    operators: tuple[str, ...] = ()
    """Operators of torch without which no node can train it."""
    mixture: Mixture | None = None
    """The experts of its model, where that is a mixture; None: it is none."""
    memory_use: MemoryUse | None = None
    """The least that its steps were measured to take."""
    lost_model: bool = False
    """The current model is damaged, and being made again from ``previous`` and ``closed``."""
    previous: Model | None = None
    closed: Round | None = None
    """The round that made ``model`` out of ``previous``."""
    evaluating: tuple[Model, ...] = ()
    evaluating_whole: tuple[int, ...] = ()
    """Rounds of those whose target is to be confirmed on all held-out samples."""
    target_mode: str = ""
    """``min`` or ``max``, see `ModelInitialised`."""
    notes: tuple[str, ...] = ()
    """What a user should know of how data and model are used."""
    score: ModelScore | None = None
    best: ModelScore | None = None
    best_model: Model | None = None
    round: Round | None = None
    long_leases: Mapping[NodeId, Participant] = {}
    """Leases over several rounds that are under way, or whose update is in and not folded yet. No
    open round counts them: the one that closes next takes those over whose update is in.
    """
    members: Mapping[NodeId, Member] = {}
    streams: tuple[Stream, ...] = ()
    plan_memory: PlanMemory | None = None
    """Memory of the newest plan that a round was opened with; the next one is made from it."""
    patience_ms: Milliseconds | None = None
    """How long its rounds may still wait for nodes on trial; None: no round has closed yet."""
    tally: Tally = Tally()
    trust: TrustMemory = TrustMemory()
    draw: str = ""
    """By which the next round draws its duplicates; empty: it has none."""
    is_over: bool = False
    """`JobEnded` is journalled: no round will be measured any more."""

    def partition_of(self, node: NodeId) -> int:
        """Number of a member's partition: where data stay on nodes, one that nobody else has."""
        slot = self.members[node].slot
        return slot if self.spec.data.stays_on_nodes else slot % len(self.streams)

    def participant(self, node: NodeId) -> Participant | None:
        """The node's newest work: under a lease over several rounds, or of the open round."""
        if (long_lease := self.long_leases.get(node)) is not None:
            return long_lease
        return self.round.participants.get(node) if self.round is not None else None

    def round_of(self, participant: Participant) -> int:
        """Number of the round that the participant's lease was given out in."""
        return participant.base.round if participant.base else self.open_round.number

    @property
    def active_phase(self) -> Phase:
        """The phase, or while paused the one that a resume returns to."""
        return self.resume_to or self.phase

    @property
    def open_round(self) -> Round:
        """The open or closing round, where there must be one."""
        if self.round is None:
            raise AssertionError("no round is open")
        return self.round

    @property
    def newest_model(self) -> Model:
        """The current model, where there must be one."""
        if self.model is None:
            raise AssertionError("the first model is not made yet")
        return self.model
