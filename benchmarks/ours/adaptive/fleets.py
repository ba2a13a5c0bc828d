"""Fleets in virtual time with and without one more node, and what that node's work comes to."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from coordinator.core.training.job import events
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.long_leases import staleness, staleness_factor
from coordinator.core.training.streams import shard_samples
from coordinator.core.training.transition import transition
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings, Trust
from hypergpu.units import Milliseconds
from netsim.link import COORDINATOR_LINK, Link, Shape
from netsim.network.world import Churn, NodeDescription, WorldDescription
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld, SpeedLie, TransferSizes

JOB = JobId("job-0")
ADDED = NodeId("added")
BATCH, STEP_MS = 16, 200
CALM = DrawnFaults()
CODECS = {
    "fp32": 400_000,
    "bf16": 200_000,
    "int8": 100_000,
    "int4": 51_000,
    "topk256": 13_000,
    "topk64": 3_000,
    "topk16": 800,
}
"""Bytes for 100,000 parameters."""


class AddedNode(NamedTuple):
    """The node that a fleet has or has not."""

    times_slower: float
    """Its steps over those of the others."""
    link: Link = COORDINATOR_LINK
    lie: SpeedLie = SpeedLie()
    churn: Churn | None = None


class FleetRun(NamedTuple):
    """What a job among a fleet came to."""

    took_ms: Milliseconds
    """From the opening of its first round to its end."""
    samples: Counter[NodeId]
    """Accepted samples of each node, each position counted once."""
    updates: Counter[NodeId]
    first_rounds: Mapping[NodeId, int]
    """Rounds that had closed before each node's first update was folded."""
    moving_ms: Mapping[NodeId, float]
    """What each node's updates took beside computing, the median of them."""
    inner_steps: int
    """Median over rounds of the middle node's H."""
    rounds: int
    weights: Mapping[NodeId, float]
    """Samples of each node in folds, each times what its staleness leaves of its weight."""
    planned_steps: Mapping[NodeId, Sequence[int]]
    """Inner steps of each of a node's leases that was planned, in order."""
    broken: tuple[str, ...]


def job_spec(*, inner_steps: int, nodes: int, rounds: int = 40, strategy: str = "aware") -> JobSpec:
    """A job of so many stated rounds."""
    training = TrainingSettings(
        rounds=rounds, inner_steps=inner_steps, batch_size=BATCH, nodes=nodes, seed=1
    )
    spec = JobSpec(
        workload="digits-softmax",
        training=training,
        evaluation=Evaluation(every=10),
        # Which nodes do a shard twice is chance: it moves a run's time by several per cent.
        trust=Trust(duplicates="none"),
    )
    return with_strategy(spec, strategy)


class UsualNodes(NamedTuple):
    """What all nodes of a fleet but the added ones are like, and what goes wrong in it."""

    link: Link = COORDINATOR_LINK
    step_ms: int = STEP_MS
    faults: DrawnFaults = CALM
    churn: Churn | None = None
    """How each of them comes and goes, the same whoever else is there."""


def run_fleet(
    spec: JobSpec,
    *,
    seed: int,
    usual: UsualNodes = UsualNodes(),  # noqa: B008 - immutable
    added: Sequence[AddedNode] = (),
) -> FleetRun:
    """Run a job among as many equal nodes as it states, and those that are added."""
    link, step_ms = usual.link, usual.step_ms
    equal = [
        NodeDescription(
            name=NodeId(f"node-{number}"),
            group="usual",
            shape=Shape(link=link),
            churn=usual.churn,
            step_floor_ms=step_ms,
        )
        for number in range(spec.training.nodes)
    ]
    more = [
        NodeDescription(
            name=NodeId(f"{ADDED}-{number}") if number else ADDED,
            group="added",
            shape=Shape(link=each.link),
            churn=each.churn,
            step_floor_ms=round(step_ms * each.times_slower),
        )
        for number, each in enumerate(added)
    ]
    description = WorldDescription(
        name="fleet", seed=seed, coordinator=COORDINATOR_LINK, nodes=(*equal, *more)
    )
    world = SimulatedWorld(
        seed=seed,
        nodes=len(description.nodes),
        jobs=(spec,),
        faults=usual.faults,
        sizes=TransferSizes(CODECS["int4"], CODECS["int4"], CODECS["fp32"], CODECS),
        step_ms=(1, 1),
        limit_ms=Milliseconds(30 * 86_400_000),
        speed_lies={NodeId(node.name): each.lie for node, each in zip(more, added, strict=True)},
        description=description,
    )
    simulation = Simulation(world)
    outcome = simulation.run()
    violations = outcome.violations
    if outcome.phases[JOB] is not Phase.FINISHED and not violations:
        violations = (f"the job is {outcome.phases[JOB].value}",)
    steps_ms = {NodeId(each.name): each.step_floor_ms for each in description.nodes}
    return _figures(simulation.journals[JOB], steps_ms, violations)


class _JournalTally:
    """What a journal says of each node's work, event by event."""

    def __init__(self, steps_ms: Mapping[NodeId, float]) -> None:
        self._steps_ms = steps_ms
        self.job: Job | None = None
        self.began_ms = Milliseconds(0)
        self.samples: Counter[NodeId] = Counter()
        self.updates: Counter[NodeId] = Counter()
        self.weights: Counter[NodeId] = Counter()
        self.firsts: dict[NodeId, int] = {}
        self.moving: dict[NodeId, list[float]] = {}
        self.planned: dict[NodeId, list[int]] = {}
        self.middle_steps: list[int] = []

    def add(self, event: events.Event) -> None:
        """Add the next event."""
        before, job = self.job, transition(self.job, event).job
        self.job = job
        if not self.began_ms and job.round is not None:
            self.began_ms = job.at_ms
        match event:
            case events.RoundPlanned(plan=plan):
                self.middle_steps.append(plan.memory.inner_steps)
                for node, part in plan.nodes.items():
                    self.planned.setdefault(node, []).append(part.inner_steps)
            case events.AggregateReady():
                self._add_fold(job)
            case events.UpdateReceived(node=node) if before is not None:
                self._add_update(before, job, node)

    def _add_fold(self, job: Job) -> None:
        if (closed_round := job.closed) is not None:
            for node, part, _ in closed_round.accepted_updates:
                factor = staleness_factor(staleness(part, closed_round.number))
                self.weights[node] += int(shard_samples(part.shard.ranges) * factor)

    def _add_update(self, before: Job, job: Job, node: NodeId) -> None:
        participant = before.participant(node)
        if participant is None:
            return
        self.samples[node] += shard_samples(participant.shard.ranges)
        self.updates[node] += 1
        steps = participant.inner_steps * participant.plan.batch(BATCH) / BATCH
        took_ms = job.at_ms - participant.assigned_at_ms - steps * self._steps_ms.get(node, 0)
        self.moving.setdefault(node, []).append(max(0.0, took_ms))
        self.firsts.setdefault(node, before.newest_model.round)


def _figures(
    journal: Sequence[events.Event], steps_ms: Mapping[NodeId, float], broken: tuple[str, ...]
) -> FleetRun:
    tally = _JournalTally(steps_ms)
    for event in journal:
        tally.add(event)
    job = tally.job
    if job is None or job.model is None:
        raise AssertionError("a job that ran has a model")
    return FleetRun(
        took_ms=Milliseconds(job.at_ms - tally.began_ms),
        samples=tally.samples,
        updates=tally.updates,
        first_rounds=tally.firsts,
        moving_ms={node: median(each) for node, each in tally.moving.items()},
        inner_steps=round(median(tally.middle_steps)),
        rounds=job.model.round,
        weights=tally.weights,
        planned_steps=tally.planned,
        broken=broken,
    )


def hurts(without: FleetRun, with_it: FleetRun) -> float:
    """Time with the node over the time without it, to the same accepted samples."""
    return with_it.took_ms / without.took_ms


def counts(found: FleetRun, node: AddedNode, step_ms: int = STEP_MS, batch: int = BATCH) -> float:
    """Accepted samples of the added node over what it computes in the job's time."""
    capacity = found.took_ms / (step_ms * node.times_slower) * batch
    return found.samples[ADDED] / capacity


def counts_of_line(found: FleetRun, node: AddedNode) -> float:
    """The same where the line is the limit: over what the added node would do in the job's time if
    it did the middle node's steps and moved its own bytes, one round after the other.
    """
    step_ms = STEP_MS * node.times_slower
    round_ms = found.inner_steps * step_ms + found.moving_ms.get(ADDED, 0.0)
    return found.samples[ADDED] / (found.took_ms / round_ms * found.inner_steps * BATCH)
