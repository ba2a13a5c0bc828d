"""The two laws with real processes on this machine: a slower node beside others, and without it."""

from collections import Counter
from typing import NamedTuple

from benchmarks.ours.adaptive.process_nodes import fleet_hub, join_node, run_job, wait_for_nodes
from hypergpu.client.history import History, update_qualities, with_event_recorded
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, TrainingSettings, Trust

_FLOOR_MS, _BATCH = 50, 32
"""A step of a node takes so long at least, of a batch of so many samples."""
_ADDED = "added"


class ProcessPoint(NamedTuple):
    """A fleet of equal nodes, and one more."""

    others: int
    times_slower: int
    inner_steps: int
    rounds: int


POINTS = (
    ProcessPoint(others=1, times_slower=10, inner_steps=20, rounds=40),
    ProcessPoint(others=3, times_slower=10, inner_steps=20, rounds=40),
    ProcessPoint(others=3, times_slower=4, inner_steps=20, rounds=40),
    ProcessPoint(others=3, times_slower=16, inner_steps=100, rounds=10),
)


class ProcessPair(NamedTuple):
    """What one more node cost, and what it brought."""

    point: ProcessPoint
    hurts: float
    """Time over that without it, to as many accepted samples."""
    counts: float
    """Its accepted samples over its capacity in that time."""
    updates: int


class _Course(NamedTuple):
    took_ms: float
    """From the opening of the first round to the end of the last one."""
    samples: Counter[str]
    updates: Counter[str]


def run_point(point: ProcessPoint) -> ProcessPair:
    """Run the same job with and without the node, each with a coordinator of its own.

    Raises:
        BenchmarkError: A job or a node did not get to its end.
    """
    without, beside = (_course(point, has_added=each) for each in (False, True))
    capacity = beside.took_ms / (_FLOOR_MS * point.times_slower) * _BATCH
    return ProcessPair(
        point=point,
        hurts=beside.took_ms / without.took_ms,
        counts=beside.samples[_ADDED] / capacity,
        updates=beside.updates[_ADDED],
    )


def _course(point: ProcessPoint, *, has_added: bool) -> _Course:
    with fleet_hub() as cluster, cluster.client() as client:
        for number in range(point.others):
            join_node(cluster, f"node-{number}", _FLOOR_MS)
        if has_added:
            join_node(cluster, _ADDED, _FLOOR_MS * point.times_slower)
        wait_for_nodes(client, point.others + has_added)
        job_id = run_job(client, _spec(point))
        names = {node.id: node.name for node in client.nodes()}
        history, samples, updates = History(), Counter[str](), Counter[str]()
        for event in client.read_events(job_id).until_newest():
            history = with_event_recorded(history, event)
            for each in update_qualities(event):
                samples[names[each.node]] += each.samples
                updates[names[each.node]] += 1
    return _Course(float(history.rounds[-1].ended_ms), samples, updates)


def _spec(point: ProcessPoint) -> JobSpec:
    training = TrainingSettings(
        rounds=point.rounds,
        inner_steps=point.inner_steps,
        batch_size=_BATCH,
        nodes=point.others,
        seed=1,
    )
    # Which nodes do a shard twice is chance.
    stated = JobSpec(
        "digits-softmax",
        training=training,
        evaluation=Evaluation(every=10),
        trust=Trust(duplicates="none"),
    )
    return with_strategy(stated, "aware")
