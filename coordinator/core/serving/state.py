"""A served model: its nodes, which of them hold it now, and what is counted of their answers."""

from collections.abc import Mapping
from enum import Enum

import msgspec
from msgspec.structs import replace

from coordinator.core.work.leases import LeasedWork
from coordinator.core.work.members import JobMember, LeasedJob
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.rings.layer_span import LayerSpan, gaps
from hypergpu.serving.serve_request import Replica, ServeRequest
from hypergpu.serving.tuned_model import ModelVersion, Tuning
from hypergpu.token_counts import TokenCount
from hypergpu.units import Milliseconds


class ServePhase(Enum):
    """Where a served model is. Snapshots hold the values: they never change."""

    SERVING = "serving"
    PAUSED = "paused"
    SETTLING = "settling"
    """It was stopped, and the last counts are being signed."""
    STOPPED = "stopped"


ENDED = frozenset({ServePhase.SETTLING, ServePhase.STOPPED})
"""Where it is served no more."""


class NodeHonesty(msgspec.Struct, frozen=True, kw_only=True):
    """What secret checks said of a node: see `coordinator.core.serving.honesty`."""

    checked_tokens: int = 0
    excess: int = 0
    """Margins of its tokens above the allowance, summed, never below 0."""
    faults: int = 0
    """Answers of it that two nodes found wrong."""


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What checks and other nodes said of a node of a ring: see
    `coordinator.core.serving.stage_honesty`.
    """

    checked: int = 0
    """Conversations of it that were right when they were computed again."""
    right_checks: int = 0
    """The same since another node last contradicted it, by nodes that do not."""
    contradictions: Mapping[NodeId, int] = {}
    """How many times each other node contradicted it, or it that one."""


class AnswerDispute(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that one node found wrong."""

    node: NodeId
    """Who gave it."""
    checker: NodeId
    before: NodeHonesty
    """What was known of the node without that check."""
    reason: str


class ServeMember(JobMember, frozen=True, kw_only=True):
    """A node that has ever joined the job."""

    failures_in_a_row: int = 0
    """Times that it gave its replica back since it was there anew or the job was resumed."""
    refusal: str = ""
    """Why it gets no replica while it is there; empty: it does."""
    honesty: NodeHonesty = NodeHonesty()
    misjudgements: int = 0
    """Checks of it that a third node contradicted."""
    stage_record: StageRecord = StageRecord()

    @property
    def exclusion(self) -> str:
        """Why the node gets no work of this job while it is there; empty: it does."""
        return self.ban or self.refusal


class LeasedReplica(LeasedWork, frozen=True, kw_only=True):
    """A replica that a node has, or gave back."""

    version: ModelVersion | None = None
    """Version of a training's model that the lease names, whatever is newer: a node that dials in
    again is told the same work. None: the model is no training's.
    """
    span: LayerSpan | None = None
    """Layers that the node holds; None: the whole model."""
    is_standby: bool = False
    """Whether it holds them ready, and answers nothing."""
    files_of: tuple[LayerSpan, ...] = ()
    """Further stages whose files a node that stands by has."""
    ring: int = 0
    """The ring that the node's layers are of, where a training has several; from 0 on."""


class CountedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A count that its node has not signed yet."""

    node: NodeId
    lease: int
    count: TokenCount
    answers: Digest
    """End of the chain of digests of what was counted."""
    is_checked: bool = False
    """Whether another node scored any of the answers."""


class StoredRound(msgspec.Struct, frozen=True, kw_only=True):
    """The newest stored round of a training through a ring."""

    rounds: int
    step: int
    loss: float
    adapter: Mapping[str, BlobRef]
    """Adapters of the layers, by the names of their files."""
    held_out_loss: float | None = None
    """Loss of rows that are held out; None: none are."""
    rings: int = 1
    """Rings whose adapters were folded."""
    ring_adapters: Mapping[int, Mapping[str, BlobRef]] = {}
    """By ring, where there are several, the same adapters with the ring's own optimizer state; a
    ring that is not among them takes ``adapter``.
    """
    momentum: Mapping[str, BlobRef] = {}
    """Outer momentum of several rings, as ``adapter``; empty: it is zero."""

    def adapter_of(self, ring: int) -> Mapping[str, BlobRef]:
        """What a ring goes on from."""
        return self.ring_adapters.get(ring, self.adapter)

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """All of it."""
        parts = (self.adapter, *self.ring_adapters.values(), self.momentum)
        return tuple(blob for part in parts for blob in part.values())


class ServeJob(LeasedJob, frozen=True, kw_only=True):
    """One served model."""

    request: ServeRequest
    phase: ServePhase = ServePhase.SERVING
    members: Mapping[NodeId, ServeMember] = {}
    leases: Mapping[NodeId, LeasedReplica] = {}
    """Nodes that hold the model, or load it."""
    refusals: tuple[LeasedReplica, ...] = ()
    """Newest replicas that came back, of nodes that get none any more."""
    terms: Terms = Terms()
    """What counts are signed under; empty: an earlier version created the job, and none are."""
    windows: Mapping[int, CountedWindow] = {}
    """Counts that are not signed yet, by their numbers."""
    next_window: int = 1
    disputes: Mapping[int, AnswerDispute] = {}
    """Answers that a third node is to score, by their numbers. They are in this process's memory
    alone: what was in dispute when it ended is not paid.
    """
    paid_units: int = 0
    """Units of counts that were accepted."""
    settle_by_ms: Milliseconds = Milliseconds(0)
    """When a model that was stopped ends, signed or not."""
    are_counts_closed: bool = False
    """Whether no further count comes."""
    files: Mapping[str, BlobRef] = {}
    """Files of a training's base, which no request names; else empty."""
    tuning: Tuning | None = None
    """What makes the model of its base, at the newest version; None: the files are the model."""
    is_unloaded: bool = False
    """Whether nodes let go of it, as nobody called; the next call loads it again."""
    stored_round: StoredRound | None = None
    """Where a training through the ring stands; None: no round of it is over, or there is none."""

    def replica(self, node: NodeId) -> Replica:
        """The work of a node that has a lease."""
        replica, version = self.request.replica, self.leases[node].version
        if self.tuning is None:
            return replica
        node_tuning = replace(self.tuning, version=version or self.tuning.version)
        return replace(replica, files=dict(self.files), tuning=node_tuning)

    @property
    def blobs(self) -> frozenset[BlobRef]:
        """Blobs that replicas need, those of leases to come among them."""
        adapter_blobs = () if self.stored_round is None else self.stored_round.blobs
        base = (*self.request.files.values(), *self.files.values(), *adapter_blobs)
        if self.tuning is None:
            return frozenset(base)
        versions = [each.version.blob for each in self.leases.values() if each.version is not None]
        return frozenset((*base, *self.tuning.blobs, *versions))

    @property
    def has_receipts(self) -> bool:
        """Whether its answers are counted."""
        return self.terms != Terms()

    @property
    def rings(self) -> int:
        """Rings that are to be there now: several of a training until it is over, then the first
        one, which answers.
        """
        training = self.request.training
        return training.rings if training is not None and self.is_training else 1

    def free_layers(self, ring: int = 0) -> tuple[LayerSpan, ...]:
        """Layers of a model that is cut which no node of a ring holds."""
        cut = self.request.cut
        if cut is None:
            return ()
        spans = (each.span for each in self.stages_of(ring).values())
        return gaps(tuple(span for span in spans if span), cut.layers)

    @property
    def open_rings(self) -> tuple[int, ...]:
        """Rings some of whose layers no node holds."""
        return tuple(ring for ring in range(self.rings) if self.free_layers(ring))

    @property
    def whole_rings(self) -> tuple[int, ...]:
        """Rings all of whose layers nodes hold; of a model that is held whole the only one."""
        return tuple(ring for ring in range(self.rings) if not self.free_layers(ring))

    def stages_of(self, ring: int) -> Mapping[NodeId, LeasedReplica]:
        """What nodes of a ring hold."""
        return {node: each for node, each in self.stages.items() if each.ring == ring}

    @property
    def stages(self) -> Mapping[NodeId, LeasedReplica]:
        """What nodes hold and answer by: all but what stands by."""
        return {node: each for node, each in self.leases.items() if not each.is_standby}

    @property
    def standby(self) -> NodeId | None:
        """The node that stands by; None: none does."""
        return next((node for node, each in self.leases.items() if each.is_standby), None)

    @property
    def is_training(self) -> bool:
        """Whether a ring still trains the model's adapter."""
        training = self.request.training
        if training is None:
            return False
        return self.stored_round is None or self.stored_round.step < training.steps

    @property
    def is_served(self) -> bool:
        """Whether it was not stopped."""
        return self.phase not in ENDED
