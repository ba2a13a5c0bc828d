"""The shard of a lease over several rounds, done by another node in secret and compared later."""

import numpy as np
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.commands import Aggregate, DuplicatedShards, FoldedUpdate
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.job.trust_memory import DuplicateMemory, TrustMemory
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.streams import shard_samples
from coordinator.core.training.transition import transition
from coordinator.core.training.trust.duplicates import RoundWorker, draw_duplicates
from coordinator.core.work import work_events
from coordinator.shell.aggregation.evidence import SketchedUpdate, weigh_sketched
from coordinator.shell.aggregation.sketch import WIDTH, UpdateSketch
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, NodeId, Slot
from hypergpu.units import Bytes
from netsim.virtual.invariants import violations
from tests.unit.job_states import (
    AWARE,
    after,
    at,
    fold_event,
    model,
    only,
    plan_event,
    update_event,
    waiting,
)

NODES = tuple(NodeId(f"{number:02d}") for number in range(6))
SLOW = NODES[-1]
PLANS = {
    node: NodePlan(40, "int4", "", forecast_ms=at(1000), step_us=25_000) for node in NODES[:-1]
} | {SLOW: NodePlan(4, "int4", "", forecast_ms=at(3000), step_us=750_000, rounds=4)}
PLANNED = replace(AWARE, training=replace(AWARE.training, rounds=200, nodes=6))


def opened_round() -> tuple[Job, NodeId]:
    """Round 1, in which the slow node's shard over several rounds is another one's as well."""
    job = waiting(PLANNED)
    for node in NODES:
        job = after(job, work_events.NodeJoined(at_ms=at(20), node=node))
    job = after(job, plan_event(0, {node: PLANS[node] for node in NODES[:-1]}))
    job = with_updates(job, NODES[:-1])
    for attempt in range(1000):
        fold = events.AggregateReady(at_ms=at(60), round=0, model=model(1), draw=f"draw-{attempt}")
        open_job = after(job, fold, plan_event(1, PLANS, at_ms=100))
        parts = open_job.open_round.participants
        repeaters = [node for node, part in parts.items() if part.repeats == SLOW]
        if repeaters and not open_job.open_round.duplicates:
            return open_job, repeaters[0]
    raise AssertionError("no draw gave the slow node's shard to another one")


def with_updates(job: Job, nodes: tuple[NodeId, ...]) -> Job:
    for node in nodes:
        part = job.open_round.participants[node]
        number = job.open_round.number
        job = after(job, update_event(node, round_=number, lease=part.lease, at_ms=job.at_ms))
    return job


def slow_update(job: Job) -> events.Event:
    lease = job.long_leases[SLOW].lease
    return update_event(SLOW, round_=1, lease=lease, at_ms=job.at_ms)


def test_another_node_does_its_shard_in_the_same_steps_and_is_told_nothing_of_it() -> None:
    job, repeater = opened_round()
    part, lease = job.open_round.participants[repeater], job.long_leases[SLOW]
    assert part.shard == lease.shard
    assert part.seed_slot == lease.slot
    assert part.base is None
    assert (part.inner_steps, part.codec) == (lease.inner_steps, lease.codec) == (4, "int4")
    assert not violations(job)


def test_both_are_compared_once_its_own_update_is_folded() -> None:
    job, repeater = opened_round()
    before = job.tally
    job = with_updates(job, NODES[:-1])
    shard = shard_samples(job.long_leases[SLOW].shard.ranges)
    twice = job.tally.samples_twice - before.samples_twice
    assert twice == shard, "the samples of the shard count once, with the lease's own update"
    kept_duplicate = job.long_leases[SLOW].duplicate
    assert kept_duplicate is not None
    assert kept_duplicate.node == repeater
    job = after(job, fold_event(1, at_ms=200), plan_event(2, dict(list(PLANS.items())[:-1])))
    assert kept_duplicate.update.blob.digest in live_blobs(job)
    samples = job.tally.samples
    job = after(job, slow_update(job))
    assert job.tally.samples == samples + shard
    job = with_updates(job, NODES[:-2])
    last = job.open_round.participants[NODES[-2]]
    step = transition(job, update_event(NODES[-2], round_=2, lease=last.lease, at_ms=300))
    fold = only(step.commands, Aggregate)
    assert fold.duplicates.earlier[SLOW].blob == kept_duplicate.update.blob
    assert repeater in {each.node for each in fold.updates}
    assert not violations(step.job)


def test_each_of_the_two_has_half_of_its_weight() -> None:
    job, repeater = opened_round()
    others = tuple(node for node in NODES[:-1] if node != repeater)
    job = with_updates(job, (repeater, *others[:-1]))
    last = job.open_round.participants[others[-1]]
    step = transition(job, update_event(others[-1], round_=1, lease=last.lease, at_ms=150))
    weights = {each.node: each.weight for each in only(step.commands, Aggregate).updates}
    # A tenth of the others' samples, and half of what those would count.
    assert weights[others[0]] == 2 * 10 * weights[repeater]


def test_a_node_that_is_lost_with_the_shard_takes_no_samples_with_it() -> None:
    job, repeater = opened_round()
    streams = job.streams
    job = after(job, work_events.NodeLost(at_ms=at(110), node=repeater, reason="silent"))
    assert job.streams == streams
    assert not job.open_round.orphans
    job = with_updates(job, tuple(node for node in NODES[:-1] if node != repeater))
    assert job.phase is Phase.AGGREGATING
    assert job.long_leases[SLOW].duplicate is None
    assert not violations(job)


def test_one_that_is_late_is_cut_and_no_longer_compared() -> None:
    job, repeater = opened_round()
    streams = job.streams
    job = with_updates(job, tuple(node for node in NODES[:-1] if node != repeater))
    timer = events.DeadlineReached(at_ms=at(job.open_round.timer_at_ms), round=1)
    job = after(job, timer)
    assert job.phase is Phase.AGGREGATING
    assert repeater not in job.long_leases
    assert job.streams == streams


def test_two_leases_over_several_rounds_are_never_compared_with_each_other() -> None:
    plan = NodePlan(4, "int4", "", rounds=4, forecast_ms=at(3000))
    workers = [RoundWorker(node, plan, has_begun=False, is_long=True) for node in NODES]
    others = [RoundWorker(node, PLANS[NODES[0]], has_begun=False) for node in NODES[:2]]
    for number in range(200):
        assert not draw_duplicates(f"a/{number}", DuplicateMemory(), workers, 4)
        pairs = draw_duplicates(f"a/{number}", DuplicateMemory(), [*others, *workers[2:]], 4)
        assert not {*pairs} - {each.node for each in others}


def comparison_of(likeness: float) -> tuple[dict[NodeId, int], set[NodeId]]:
    """Matches and doubts after a lease's update that is so alike the one before."""
    dice = np.random.default_rng(3)
    slope, shard = dice.normal(size=WIDTH), dice.normal(size=WIDTH)

    def sketch_of(node: NodeId, own: np.ndarray) -> SketchedUpdate:
        vector = slope + own + 0.3 * dice.normal(size=WIDTH)
        return SketchedUpdate(node, 4, UpdateSketch(vector, float(np.linalg.norm(vector)), 0.0))

    other = dice.normal(size=WIDTH)
    own = likeness * shard + (1 - likeness) * other
    sketches = [sketch_of(node, dice.normal(size=WIDTH)) for node in NODES[:-1]]
    sketches.append(sketch_of(SLOW, own))
    before = sketch_of(NODES[0], shard)
    blob = BlobRef(Digest("earlier"), Bytes(4))
    folded_update = FoldedUpdate(NODES[0], Slot(0), blob, 0, "int4", 4)
    duplicate_memory = DuplicateMemory(likeness=(0.7, 0.7, 0.7))
    weighing = weigh_sketched(
        TrustMemory(duplicates=duplicate_memory),
        "robust",
        sketches,
        None,
        DuplicatedShards(earlier={SLOW: folded_update}),
        {SLOW: before},
    )
    memory = weighing.memory.duplicates
    return memory.matches, set(memory.doubts)


def test_an_honest_lease_is_spoken_for_and_one_that_made_it_up_is_doubted() -> None:
    assert comparison_of(1.0) == ({SLOW: 1, NODES[0]: 1}, set())
    assert comparison_of(0.0) == ({}, {SLOW, NODES[0]})
