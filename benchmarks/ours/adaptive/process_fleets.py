"""The two laws with real processes on this machine: a slower node beside others, and without it."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.ours.adaptive.process_nodes import fleet_hub, join_node, run_job, wait_for_nodes
from benchmarks.ours.cluster import BenchmarkError
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings, Trust
from hypergpu.journal.events import RoundMeasuredEvent
from hypergpu.user.client.history import History, with_event_recorded

_FLOOR_MS, _BATCH = 50, 32
"""A step of a node takes so long at least, of a batch of so many samples."""
_ADDED = "added"


class ProcessPoint(NamedTuple):
    """A fleet of equal nodes, and one more."""

    others: int
    times_slower: int
    inner_steps: int
    rounds: int
    seeds: tuple[int, ...] = (1,)


POINTS = (
    ProcessPoint(others=1, times_slower=10, inner_steps=20, rounds=40),
    ProcessPoint(others=3, times_slower=10, inner_steps=20, rounds=40, seeds=(1, 2, 3)),
    ProcessPoint(others=3, times_slower=4, inner_steps=20, rounds=40),
    ProcessPoint(others=3, times_slower=16, inner_steps=100, rounds=10),
)


class ProcessPair(NamedTuple):
    """What one more node cost, and what it brought."""

    point: ProcessPoint
    seed: int
    hurts: float
    """Time over that without it, to as many accepted samples."""
    loss_hurts: float
    """The same to the held-out loss that both reach."""
    counts: float
    """Its accepted samples over its capacity in that time."""
    updates: int


class _Course(NamedTuple):
    took_ms: float
    """From the opening of the first round to the end of the last one."""
    losses: tuple[tuple[float, float], ...]
    """Times since that opening, and held-out losses."""
    samples: Counter[str]
    updates: Counter[str]


def run_points(points: Sequence[ProcessPoint]) -> list[ProcessPair]:
    """Run each of them with each of its seeds, one after the other."""
    return [_run_pair(point, seed) for point in points for seed in point.seeds]


def _run_pair(point: ProcessPoint, seed: int) -> ProcessPair:
    """Run the same job with and without the node, each with a coordinator of its own.

    Raises:
        BenchmarkError: A job or a node did not get to its end.
    """
    without, beside = (_course(point, seed, has_added=each) for each in (False, True))
    target = max(min(loss for _, loss in each.losses) for each in (without, beside))
    capacity = beside.took_ms / (_FLOOR_MS * point.times_slower) * _BATCH
    return ProcessPair(
        point=point,
        seed=seed,
        hurts=beside.took_ms / without.took_ms,
        loss_hurts=_reached_ms(beside, target) / _reached_ms(without, target),
        counts=beside.samples[_ADDED] / capacity,
        updates=beside.updates[_ADDED],
    )


def _reached_ms(course: _Course, target: float) -> float:
    """When a loss was reached, on the line between the evaluations before and after it."""
    (before_ms, before), *later = course.losses
    for at_ms, loss in later:
        if loss <= target:
            share = (before - target) / (before - loss) if before > loss else 1.0
            return before_ms + share * (at_ms - before_ms)
        before_ms, before = at_ms, loss
    raise BenchmarkError(f"no evaluation found a loss of {target:.3f}")


def _course(point: ProcessPoint, seed: int, *, has_added: bool) -> _Course:
    with fleet_hub() as cluster, cluster.client() as client:
        for number in range(point.others):
            join_node(cluster, f"node-{number}", _FLOOR_MS)
        if has_added:
            join_node(cluster, _ADDED, _FLOOR_MS * point.times_slower)
        wait_for_nodes(client, point.others + has_added)
        job_id = run_job(client, _spec(point, seed))
        names = {node.id: node.name for node in client.nodes()}
        history, samples, updates = History(), Counter[str](), Counter[str]()
        for event in client.read_events(job_id).until_newest():
            history = with_event_recorded(history, event)
            content = event.content
            for work in content.updates if isinstance(content, RoundMeasuredEvent) else ():
                samples[names[work.node]] += work.contribution.samples
                updates[names[work.node]] += 1
    ends = {each.number: float(each.ended_ms) for each in history.rounds}
    losses = [(ends.get(it.round, 0.0), it.loss) for it in history.evaluations]
    known_losses = tuple((at_ms, loss) for at_ms, loss in losses if loss is not None)
    return _Course(float(history.rounds[-1].ended_ms), known_losses, samples, updates)


def _spec(point: ProcessPoint, seed: int) -> JobSpec:
    training = TrainingSettings(
        rounds=point.rounds,
        inner_steps=point.inner_steps,
        batch_size=_BATCH,
        nodes=point.others,
        seed=seed,
    )
    # Which nodes do a shard twice is chance.
    spec = JobSpec(
        "digits-softmax",
        training=training,
        evaluation=Evaluation(every=2),
        trust=Trust(duplicates="none"),
    )
    return with_strategy(spec, "aware")
