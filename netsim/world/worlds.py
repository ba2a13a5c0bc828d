"""A world to simulate: how many nodes and jobs, how good their links, how much goes wrong."""

import random

import msgspec

from hypergpu.spec import Codec, Evaluation, JobSpec, RoundRule, Training
from hypergpu.units import Milliseconds
from netsim.world.links import Link


class Faults(msgspec.Struct, frozen=True):
    """Mean times between faults, in virtual milliseconds; 0: never."""

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


class World(msgspec.Struct, frozen=True):
    """Everything a simulation depends on. Equal worlds give equal journals."""

    seed: int
    nodes: int
    jobs: tuple[JobSpec, ...]
    faults: Faults = Faults()
    faults_until_ms: Milliseconds = Milliseconds(600_000)
    """Faults stop here, so that every job can be expected to end."""
    limit_ms: Milliseconds = Milliseconds(7_200_000)
    model_bytes: int = 400_000
    step_ms: tuple[int, int] = (20, 400)
    """Fastest and slowest inner step in the world."""
    checks_each_event: bool = True
    """Check the invariants after every event, or only when a round closes."""


def random_world(seed: int) -> World:
    """A small world in which a lot goes wrong."""
    dice = random.Random(seed)
    nodes = dice.randint(1, 8)
    vanishing = dice.choice((0.0, 0.0, 0.5))
    # A job that needs nodes to start would wait for ever for those that vanished before.
    needed = 1 if vanishing else nodes
    specs = tuple(_random_spec(dice, needed) for _ in range(dice.choice((1, 1, 2))))
    faults = Faults(
        link_cut_ms=dice.choice((0, 5_000, 60_000)),
        node_crash_ms=dice.choice((0, 20_000, 120_000)),
        coordinator_crash_ms=dice.choice((0, 3_000, 30_000)),
        drain_ms=dice.choice((0, 30_000)),
        vanishing=vanishing,
        worker_death=dice.choice((0.0, 0.05)),
        away_ms=dice.choice((500, 5_000, 40_000)),
    )
    return World(seed, nodes, specs, faults)


def _random_spec(dice: random.Random, nodes: int) -> JobSpec:
    return JobSpec(
        workload="digits-softmax",
        training=Training(
            rounds=dice.randint(2, 30),
            inner_steps=dice.randint(1, 40),
            batch_size=8,
            seed=dice.randint(0, 9),
            nodes=dice.randint(1, nodes),
        ),
        codec=Codec(up="int8"),
        round=RoundRule(
            deadline_ms=dice.choice((0, 5_000, 20_000)), quorum=dice.choice((0.3, 0.6, 1.0))
        ),
        evaluation=Evaluation(every=dice.randint(1, 3)),
    )


def calm_world(seed: int, nodes: int, rounds: int) -> World:
    """Many nodes, one job, nothing goes wrong."""
    spec = JobSpec(
        workload="digits-softmax",
        training=Training(rounds=rounds, inner_steps=20, batch_size=8, seed=seed, nodes=nodes),
        evaluation=Evaluation(every=10),
    )
    return World(seed, nodes, (spec,), checks_each_event=False)


def random_link(dice: random.Random) -> Link:
    """Anything from a neighbour on fibre to a bad line far away."""
    return Link(
        one_way_ms=Milliseconds(dice.randint(1, 150)),
        up_bytes_per_s=dice.choice((250_000, 2_500_000, 12_500_000)),
        down_bytes_per_s=dice.choice((1_250_000, 12_500_000, 125_000_000)),
    )
