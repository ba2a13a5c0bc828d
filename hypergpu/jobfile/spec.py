"""A job's settings in their validated form."""

import math

import msgspec

from hypergpu.jobfile.requirements import Requirement, parse_requirement
from hypergpu.journal.worth import most_for
from hypergpu.ledger_terms import AMOUNT_MOST
from hypergpu.optimizer import MUON_MOMENTUM, OptimizerRule
from hypergpu.units import Samples
from hypergpu.workloads.metrics import BY_NAME

CODECS = ("fp32", "bf16", "int8", "int4", "topk256", "topk64", "topk16")
SPARSE_CODECS = ("topk256", "topk64", "topk16")
"""The largest values of each 4,096 and no others; lighter from left to right."""

STRATEGIES = ("sync", "fedavg", "diloco", "aware")
"""How a job trades communication for progress. `hypergpu.jobfile` knows what each of them fixes."""

DEFAULT_STRATEGY = "aware"
"""The strategy of a job file, a job of Python or the page's form that names none."""

PLANNED = ("codec.up", "codec.down", "round.connections")
"""Keys that the plans of ``aware`` decide for each node, unless the job's file states them."""


class TrainingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Amount of training, and the number of nodes."""

    rounds: int = 40
    inner_steps: int = 20
    """Inner steps a participant takes in a round (H)."""
    batch_size: int = 32
    seed: int = 0
    nodes: int = 1
    """The job starts when this many nodes have joined."""


class NodeSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that may work for the job; `TrainingSettings.nodes` is the least number of them."""

    max: int = 0
    """Nodes that it gets at most; 0: no limit."""
    priority: int = 0
    """Among the jobs of one owner the higher gets its least nodes first."""
    weight: int = 1
    """Its part of the nodes beyond the least that the owner's jobs get."""
    labels: tuple[str, ...] = ()
    """Requirements that a node has to meet, all of them: see `hypergpu.jobfile.requirements`."""

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """``labels`` of a spec that was checked, parsed."""
        return tuple(parse_requirement(text) for text in self.labels)


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights that a job begins with."""

    init: str = ""
    """A safetensors file on the user's machine, or the id of a job of their own whose newest model
    is taken; empty: the workload draws them.
    """


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inner optimizer; see `hypergpu.optimizer.OptimizerRule`."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: str = "constant"
    """``constant``, ``cosine`` or ``linear``; indexed by the samples the whole job has processed.
    """
    optimizer: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.0
    decay_scope: str = "all"
    clip_norm: float = 0.0
    micro_batch: int = 0
    muon_ratio: float | msgspec.UnsetType = msgspec.UNSET
    """Unset, it is left out of the spec's text, as by versions that had no Muon."""

    @property
    def rule(self) -> OptimizerRule:
        """The optimizer without its learning rate."""
        usual_momentum = MUON_MOMENTUM if self.optimizer == "muon" else 0.0
        return OptimizerRule(
            name=self.optimizer,
            weight_decay=self.weight_decay,
            decay_scope=self.decay_scope,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            momentum=self.momentum or usual_momentum,
            muon_ratio=self.muon_ratio,
            clip_norm=self.clip_norm,
            micro_batch=self.micro_batch,
        )


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outer optimizer: Nesterov SGD on the mean pseudo-gradient."""

    learning_rate: float = 0.7
    momentum: float = 0.9


MOMENTUM_MOST_OVERLAPPED = 0.5
"""Most outer momentum beside overlapping rounds: stale updates with more of it diverge."""


class OuterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job states of its outer optimizer. Where it states neither, each round's step is
    chosen (`coordinator.core.work.outer_step`); where it states one, the other is `Outer`'s.
    """

    learning_rate: float | None = None
    momentum: float | None = None


class CodecChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Codecs of updates (up) and models (down): one of `CODECS`."""

    up: str = "int4"
    down: str = "int4"


_ROUNDING = 1e-9
"""0.55 * 20 is a little more than 11 in floating point."""


class RoundRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules by which a round closes before all its updates have arrived."""

    deadline_ms: int = 0
    """Time limit of a round; 0: limits follow from what was measured."""
    quorum: float = 0.6
    """Least share of the assigned updates that may close a round at its deadline, in (0, 1]; with
    1 a round waits for every node that is not lost.
    """
    connections: int = 1
    """Connections of each node for models and updates, where no plan decides on them."""
    overlap: str = "none"
    """What nodes do while their updates are on the way: ``none`` waits, ``eager`` begins the next
    round.
    """

    def updates_needed(self, updates: int) -> int:
        """Return how many updates may close a round that expects so many; at least 1."""
        return max(1, math.ceil(self.quorum * updates - _ROUNDING))


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution of samples over participants."""

    sharding: str = "iid"
    """``iid`` or ``dirichlet``."""
    alpha: float = 0.5
    """Dirichlet concentration; only for ``dirichlet``."""
    partitions: int = 0
    """Partitions of a Dirichlet split; 0 is `Training.nodes`."""
    path: str = ""
    """A folder on the user's machine whose files are uploaded; empty for the workload's own data.
    """
    source: str = "shared"
    """``shared``: any node may train on any sample; ``node``: each on a folder of its own alone,
    and ``path`` holds held-out samples.
    """
    name: str = ""
    """Name of the data set, by which nodes' owners name their folders; only for ``node``."""

    @property
    def stays_on_nodes(self) -> bool:
        """Whether training samples never leave the nodes that have them."""
        return self.source == "node"

    @property
    def is_common(self) -> bool:
        """Whether any node may train on any sample, so that unequal work biases no model."""
        return self.sharding == "iid" and not self.stays_on_nodes


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Schedule of evaluations and snapshots."""

    every: int = 5
    """Rounds between evaluations; the last round is always evaluated."""
    target: float = 0.0
    """The job is finished as soon as an evaluation's metric reaches it; 0: never before its end."""
    target_mode: str = BY_NAME
    """``min``: the metric falls to the target; ``max``: it rises; ``name``: by the metric's name.
    """
    samples: int = 10_000
    """Held-out samples of an evaluation between the first and the last, always the same ones; 0:
    all. The first and the last evaluation, and one that reaches the target, measure all.
    """


class Aware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Goals and limits of the plans of the strategy ``aware``; other strategies ignore them."""

    utilisation: float = 0.85
    """Share of the time that nodes are to compute."""
    inner_steps_max: int = 500
    rounds_min: int = 30
    """Rounds that the work is divided into at least, however slow the network."""
    sparsest: str = "topk64"
    """The lightest codec that a plan may choose."""
    batch_rate: str = "scaled"
    """Learning rate of a node whose batch is not the stated one: ``scaled`` by the rule of
    `coordinator.core.training.plan.batches.batch_rate`, or as ``stated``.
    """
    stated_keys: tuple[str, ...] = ()
    """Keys of `PLANNED` that plans take as the job states them. A job file's reader lists here
    those that the file writes.
    """

    @property
    def exchanges_each_step(self) -> bool:
        """Whether every node takes one step a round, whatever is measured."""
        return self.inner_steps_max == 1

    def takes_as_stated(self, key: str) -> bool:
        """Whether plans take this key of `PLANNED` as the job states it."""
        return key in self.stated_keys


class Pay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pay for accepted work, in the smallest units of the ledger's token; none by default.

    An update's score is its samples times its quality in 1/10,000.
    """

    unit_price: int = 0
    """Price of a score of 1,000,000, which is a hundred samples of full quality. 0: no pay."""
    escrow: int = 0
    """Amount set aside for the job; 0: the most that the stated work may cost with all nodes that
    are known when the job is created. No round opens that the escrow might not cover.
    """
    rounds_per_epoch: int = 10
    """Rounds that are settled together."""

    def most_for(self, samples: int) -> int:
        """Return the pay for samples whose updates are all of full quality."""
        return most_for(self.unit_price, samples)


class Trust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protection of the model from nodes that lie or fail."""

    rule: str = "robust"
    """``robust`` weighs updates by what they do for held-out data; ``mean`` counts all in full."""
    duplicates: str = "secret"
    """``secret``: now and then two nodes train the same shard, drawn by a secret of the
    coordinator, and their updates are compared; ``none``: never.
    """
    token_share: float = 0.8
    """Largest part of a round's weight that the nodes of one join token have together, where nodes
    of others are there; 1: all of it.
    """


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One training run, from the job file."""

    workload: str
    name: str = ""
    strategy: str = "diloco"
    """One of `STRATEGIES`. A spec that names none was written before there was another default than
    this; a job file that names none is of `DEFAULT_STRATEGY`.
    """
    options: dict[str, str | int | float | bool] = {}
    """The workload's own settings, validated by the workload."""
    training: TrainingSettings = TrainingSettings()
    nodes: NodeSelection = NodeSelection()
    model: ModelSettings = ModelSettings()
    inner: Inner = Inner()
    outer: OuterSettings = OuterSettings()
    codec: CodecChoice = CodecChoice()
    round: RoundRule = RoundRule()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    aware: Aware = Aware()
    pay: Pay = Pay()
    trust: Trust = Trust()

    @property
    def stated_samples(self) -> Samples:
        """Samples that the job file asks for, summed over all nodes."""
        each = self.training
        return Samples(each.rounds * each.inner_steps * each.batch_size * each.nodes)

    @property
    def most_samples(self) -> Samples:
        """Most samples that may be paid: the last round of a planned job may exceed the rest."""
        spare = self.stated_samples // 4 if self.strategy == "aware" else 0
        return Samples(self.stated_samples + spare)

    @property
    def escrow(self) -> int:
        """Amount set aside for the job, in the token's smallest units. Where the ledger can hold
        what the stated samples cost, but not what the last planned round may add, all it can hold.
        """
        stated_amount, most = (
            self.pay.most_for(self.stated_samples),
            self.pay.most_for(self.most_samples),
        )
        return self.pay.escrow or max(stated_amount, min(most, AMOUNT_MOST))
