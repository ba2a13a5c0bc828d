"""A world to simulate: nodes, jobs, links, what goes wrong, and the bytes that rounds move.

A world has no tensors, only their sizes.
"""

import random

import msgspec
from msgspec.structs import replace

from coordinator.core.training.job.chain import extend_chain
from coordinator.core.training.job.state import Model
from coordinator.core.training.plan import decision
from hypergpu.assignment import Delta
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, NodeId
from hypergpu.jobfile.spec import (
    CODECS,
    Aware,
    CodecChoice,
    Evaluation,
    JobSpec,
    OuterSettings,
    Pay,
    RoundRule,
    TrainingSettings,
)
from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import COORDINATOR_LINK, CongestionControl, Link, LinkDirection, NetsimError, Shape
from netsim.network.pairs import require_no_pairs
from netsim.network.world import NodeDescription, WorldDescription


class TransferSizes(msgspec.Struct, frozen=True):
    """Where codecs are not named, everything is as large as ``model`` and ``update`` say."""

    model: int = 400_000
    """Down: the model, or the delta that it comes as."""
    update: int = 100_000
    """Up."""
    whole: int = 0
    """Down, where a node holds nothing that deltas lead on from; 0: as much as always."""
    codecs: dict[str, int] = {}
    """An update or a delta in each codec that may be chosen."""

    def update_bytes(self, codec: str) -> Bytes:
        """Return the size of an update."""
        return Bytes(self.codecs.get(codec, self.update))

    def delta_bytes(self, codec: str) -> Bytes:
        """Return the size of a delta."""
        return Bytes(self.codecs.get(codec, self.model))

    @property
    def model_bytes(self) -> Bytes:
        """Size of a model as a blob."""
        return Bytes(self.whole or self.model)

    def next_model(self, base: Model, digest: Digest, *, down: str) -> Model:
        """The model that a fold makes of another, with the deltas that lead to it."""
        blob = BlobRef(digest, self.model_bytes)
        if down == "fp32" or not self.whole:
            return Model(base.round + 1, blob)
        # A delta's digest is never looked at: it names what it leads to.
        difference = BlobRef(digest, self.delta_bytes(down))
        deltas = extend_chain(base, Delta(base.blob.digest, difference, down), blob.size_bytes)
        return Model(base.round + 1, blob, deltas=deltas)

    def for_plans(self) -> decision.ModelSizes:
        """What plans are told."""
        bytes_by_codec = {codec: self.update_bytes(codec) for codec in CODECS}
        return decision.ModelSizes(bytes_by_codec, self.model_bytes)


class DrawnFaults(msgspec.Struct, frozen=True):
    """Mean times between drawn faults, in virtual milliseconds; 0: never. A world's own script of
    faults comes besides.
    """

    link_cut_ms: int = 0
    """Per node: its connection breaks and heals by itself."""
    node_crash_ms: int = 0
    """Per node: the daemon is killed and comes back with what it had persisted."""
    coordinator_crash_ms: int = 0
    """The coordinator is killed, between persisting and acting, and comes back."""
    drain_ms: int = 0
    """Per node: its owner asks it to drain; it leaves in good order and comes back later."""
    vanishing: float = 0.0
    """Share of node crashes after which the node never comes back; one node always does."""
    worker_death: float = 0.0
    """Share of trainings that kill the worker process."""
    away_ms: int = 20_000
    """Longest absence after a fault."""
    starting_ms: int = 0
    """How long the worker of a node that came back takes to start."""


class SpeedLie(msgspec.Struct, frozen=True):
    """What a node does to seem faster or slower than it is."""

    stated_share: float = 1.0
    """The share of the time that its steps take which it states."""
    hold_ms: int = 0
    """How long it holds each finished update back."""


class SimulatedWorld(msgspec.Struct, frozen=True):
    """Everything a simulation depends on. Equal worlds give equal journals."""

    seed: int
    nodes: int
    jobs: tuple[JobSpec, ...]
    faults: DrawnFaults = DrawnFaults()
    faults_until_ms: Milliseconds = Milliseconds(600_000)
    """Drawn faults stop here, so that every job can be expected to end."""
    limit_ms: Milliseconds = Milliseconds(7_200_000)
    sizes: TransferSizes = TransferSizes()
    step_ms: tuple[int, int] = (20, 400)
    """Fastest and slowest inner step in the world, where a node's description sets no floor."""
    checks_each_event: bool = True
    """Check the invariants after every event, or only when a round closes."""
    late_nodes: int = 0
    """So many of the last nodes are there only from `Simulation.start_late_nodes` on."""
    speed_lies: dict[NodeId, SpeedLie] = {}
    """What single nodes do to seem faster or slower."""
    description: WorldDescription | None = None
    """Links, devices, churn and the script of faults; None: links are drawn."""


def described_world(
    description: WorldDescription, sizes: TransferSizes, *, own_step_ms: int = 20
) -> SimulatedWorld:
    """The world of a world file.

    Args:
        description: What the file says.
        sizes: What its job moves.
        own_step_ms: An inner step on a machine that plays no slower device.

    Raises:
        NetsimError: It names no job, or has delays of pairs.
    """
    require_no_pairs(description.pairs, "virtual time")
    if description.job is None:
        raise NetsimError(f"the world {description.name} has no job", "add a [job] to it")
    return SimulatedWorld(
        description.seed,
        len(description.nodes),
        (description.job,),
        limit_ms=Milliseconds(30 * 86_400_000),
        sizes=sizes,
        step_ms=(own_step_ms, own_step_ms),
        checks_each_event=False,
        description=description,
    )


_DRAWN_CODECS = {
    "fp32": 400_000,
    "bf16": 200_000,
    "int8": 100_000,
    "int4": 51_000,
    "topk256": 13_000,
    "topk64": 3_000,
    "topk16": 800,
}
"""Sizes for 100,000 parameters."""


_OVERLAPPING = 1 / 3
"""Share of drawn jobs."""


def random_world(seed: int) -> SimulatedWorld:
    """A small world in which a lot goes wrong."""
    dice = random.Random(seed)
    nodes = dice.randint(1, 8)
    vanish_chance = dice.choice((0.0, 0.0, 0.5))
    # A job that needs nodes to start would wait for ever for those that vanished before.
    needed_nodes = 1 if vanish_chance else nodes
    specs = tuple(_random_spec(dice, needed_nodes) for _ in range(dice.choice((1, 1, 2))))
    eager = random.Random(f"{seed}/overlap")
    specs = tuple(_overlapping(spec) if eager.random() < _OVERLAPPING else spec for spec in specs)
    faults = DrawnFaults(
        link_cut_ms=dice.choice((0, 5_000, 60_000)),
        node_crash_ms=dice.choice((0, 20_000, 120_000)),
        coordinator_crash_ms=dice.choice((0, 3_000, 30_000)),
        drain_ms=dice.choice((0, 30_000)),
        vanishing=vanish_chance,
        worker_death=dice.choice((0.0, 0.05)),
        away_ms=dice.choice((500, 5_000, 40_000)),
    )
    sizes = TransferSizes(whole=_DRAWN_CODECS["fp32"], codecs=_DRAWN_CODECS)
    return SimulatedWorld(seed, nodes, specs, faults, sizes=sizes)


def _random_spec(dice: random.Random, nodes: int) -> JobSpec:
    strategy = dice.choice(("diloco", "diloco", "aware"))
    training = TrainingSettings(
        rounds=dice.randint(2, 30),
        inner_steps=dice.randint(1, 40),
        batch_size=8,
        seed=dice.randint(0, 9),
        nodes=dice.randint(1, nodes),
    )
    return JobSpec(
        workload="digits-softmax",
        strategy=strategy,
        training=training,
        codec=CodecChoice(up="int8"),
        round=RoundRule(
            deadline_ms=dice.choice((0, 5_000, 20_000)) if strategy == "diloco" else 0,
            quorum=dice.choice((0.3, 0.6, 1.0)),
        ),
        evaluation=Evaluation(every=dice.randint(1, 3)),
        # Where every step is exchanged nodes have batches of their own.
        aware=Aware(inner_steps_max=dice.choice((1, 500))) if strategy == "aware" else Aware(),
        pay=_pay(training),
    )


def _overlapping(spec: JobSpec) -> JobSpec:
    """The job with rounds that overlap."""
    aware = replace(spec.aware, sparsest="int4") if spec.strategy == "aware" else spec.aware
    eager = replace(spec.round, overlap="eager")
    return replace(spec, round=eager, outer=OuterSettings(momentum=0.5), aware=aware)


def _pay(training: TrainingSettings) -> Pay:
    """Half of the jobs pay, with an escrow for more nodes than they state."""
    if training.seed % 2:
        return Pay(rounds_per_epoch=3)
    return Pay(1_000, escrow=10**12, rounds_per_epoch=1 + training.rounds % 5)


def calm_world(seed: int, nodes: int, rounds: int) -> SimulatedWorld:
    """Many nodes, one job, nothing goes wrong."""
    spec = JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(
            rounds=rounds, inner_steps=20, batch_size=8, seed=seed, nodes=nodes
        ),
        evaluation=Evaluation(every=10),
    )
    return SimulatedWorld(seed, nodes, (spec,), checks_each_event=False)


def drawn_description(world: SimulatedWorld) -> WorldDescription:
    """Links for a world that describes none: anything from a neighbour to a bad line far away."""
    names = [f"node-{number:04}" for number in range(world.nodes)]
    return WorldDescription(
        name="drawn",
        seed=world.seed,
        coordinator=COORDINATOR_LINK,
        nodes=tuple(
            NodeDescription(
                name=NodeId(name),
                group="drawn",
                shape=Shape(link=random_link(random.Random(f"{world.seed}/link/{name}"))),
            )
            for name in names
        ),
    )


def random_link(dice: random.Random) -> Link:
    """Few enough kinds that a thousand nodes share their forecasts."""
    delay_us = Microseconds(1000 * dice.choice((1, 5, 10, 20, 40, 80, 150)))
    jitter_us = Microseconds(delay_us // dice.choice((5, 10, 50)))
    loss, burst_packets = dice.choice(((0.0, 1), (0.0, 1), (0.0002, 2), (0.002, 4), (0.01, 4)))
    up, down = (
        LinkDirection(
            delay_us=delay_us,
            jitter_us=jitter_us,
            loss=loss,
            burst_packets=burst_packets,
            bits_per_s=1_000_000 * dice.choice(mbit_s),
        )
        for mbit_s in ((2, 20, 100), (10, 100, 1000))
    )
    return Link(up=up, down=down, congestion_control=CongestionControl.CUBIC)
