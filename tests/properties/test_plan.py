"""Plans and the ways of dividing samples: what holds for every fleet and every seed."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.network.reading import Estimate, NodeReading, median_reading
from coordinator.core.training.plan.codecs import CodecFamily, byte_budget, node_codec
from coordinator.core.training.plan.connections import connection_count
from coordinator.core.training.plan.decision import (
    BatchGrowth,
    NodeMemory,
    NodeResult,
    PlanMemory,
    PlanRequest,
    RoundPlan,
)
from coordinator.core.training.plan.inner_steps import own_steps
from coordinator.core.training.plan.node_speed import NodeSpeed, stated_speed
from coordinator.core.training.plan.planning import plan_round
from coordinator.core.training.plan.step_limits import StepBounds
from hypergpu.assignment import SampleRange
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import CODECS, SPARSE_CODECS, Aware, JobSpec
from hypergpu.partitions import Sharding, partition_indices, permutation, stream_indices
from hypergpu.units import Milliseconds, Samples
from tests.unit.plan.fleet import SIZES, Truth, names, reading_of, spec, total_samples

truths = st.builds(
    Truth,
    step_ms=st.floats(1, 2000),
    up_mbit_s=st.floats(0.05, 1000),
    down_mbit_s=st.floats(0.05, 1000),
    rtt_ms=st.floats(0.5, 600),
    loss=st.sampled_from([0.0, 0.001, 0.01, 0.05]),
    congestion_control=st.sampled_from(["cubic", "reno", "bbr", ""]).map(
        lambda name: name or "cubic"
    ),
)
steady = st.builds(
    Truth,
    step_ms=st.floats(10, 500),
    up_mbit_s=st.floats(0.5, 100),
    down_mbit_s=st.floats(1, 200),
    rtt_ms=st.floats(5, 300),
)


def _blocked_reading(of: tuple[Truth, float, float]) -> NodeReading:
    """Reading of a node whose probes are blocked: a loss bound, and packets its kernel counted."""
    truth, bound, counted_packets = of
    return replace(
        reading_of(truth),
        is_probing_blocked=True,
        packets_sent=counted_packets,
        packets_lost=counted_packets / 100,
        bursts_lost=counted_packets / 100,
        loss_bound=bound,
    )


readings = st.one_of(
    st.just(NodeReading()),
    truths.map(reading_of),
    truths.map(lambda truth: replace(reading_of(truth), step_us=Estimate())),
    truths.map(lambda truth: replace(reading_of(truth), up_bits_per_s=Estimate())),
    st.tuples(truths, st.floats(0.5, 3)).map(
        lambda of: replace(reading_of(of[0]), correction=of[1])
    ),
    st.tuples(truths, st.floats(0, 0.5), st.sampled_from([0.0, 0.01, 50.0, 600.0])).map(
        _blocked_reading
    ),
)
specs = st.builds(
    lambda nodes, rounds, inner, sharding, quorum, aware: spec(
        nodes=nodes, rounds=rounds, inner_steps=inner, sharding=sharding, quorum=quorum, aware=aware
    ),
    st.integers(1, 8),
    st.integers(1, 400),
    st.integers(1, 100),
    st.sampled_from(["iid", "dirichlet"]),
    st.floats(0.01, 1.0),
    st.builds(
        Aware,
        utilisation=st.floats(0.3, 0.99),
        inner_steps_max=st.integers(1, 600),
        rounds_min=st.integers(1, 100),
        sparsest=st.sampled_from(["int4", *SPARSE_CODECS[:2]]),
    ),
)
memories = st.builds(
    NodeMemory,
    codec=st.sampled_from(["", "int4", "topk256", "topk64"]),
    lighter_rounds=st.integers(0, 3),
    rests_until_round=st.integers(0, 60),
    retries=st.integers(0, 6),
    inner_steps=st.integers(0, 600),
    connections=st.sampled_from([0, 1, 4, 8, 16]),
    cut_rounds=st.integers(0, 4),
    is_awaited=st.booleans(),
    batch_size=st.integers(4, 64) | st.just(0),
    growth=st.builds(
        BatchGrowth,
        size=st.sampled_from([0, 64, 128]),
        sample_us=st.floats(0, 1e6),
        updates=st.integers(0, 9),
        trial=st.sampled_from([0, 64, 128, 4096]),
        tries_us=st.lists(st.floats(0, 1e6), max_size=1).map(tuple),
        next_round=st.integers(0, 60),
        failures=st.integers(0, 9),
    ),
)


@st.composite
def planning_cases(draw: st.DrawFn) -> tuple[PlanRequest, dict[NodeId, NodeReading]]:
    """A request at any time of any job, with or without a plan before it."""
    job = draw(specs)
    nodes = names(draw(st.integers(1, 8)))
    total = total_samples(job)
    request = PlanRequest(
        round=draw(st.integers(1, 50)),
        at_ms=Milliseconds(0),
        spec=job,
        candidates={node: Slot(slot) for slot, node in enumerate(nodes)},
        samples_done=Samples(draw(st.integers(0, total))),
        samples_total=total,
        agreement=draw(st.none() | st.floats(0.1, 8)),
        line_bits_per_s=draw(st.sampled_from([0, 1_000_000, 100_000_000])),
    )
    readings_by_node = {node: draw(readings) for node in nodes}
    if draw(st.booleans()):
        before = plan_round(replace(request, round=request.round - 1), readings_by_node, SIZES)
        took = draw(st.sampled_from([0, 1000]))
        results = {n: NodeResult(p, Milliseconds(took)) for n, p in before.nodes.items()}
        remembered_nodes = {
            **before.memory.nodes,
            **draw(st.dictionaries(st.sampled_from(nodes), memories)),
        }
        memory = replace(before.memory, nodes=remembered_nodes, is_sparse=draw(st.booleans()))
        request = replace(request, previous=memory, results=results)
    return request, readings_by_node


def _levels(job: JobSpec) -> tuple[str, ...]:
    return CODECS[CODECS.index("int4") : CODECS.index(job.aware.sparsest) + 1]


@given(planning_cases())
@settings(max_examples=150, deadline=None)
def test_no_plan_asks_for_what_cannot_be(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    plan = plan_round(request, readings_by_node, SIZES)
    assert plan.nodes
    assert plan.nodes.keys() | plan.resting.keys() == request.candidates.keys()
    assert not plan.nodes.keys() & plan.resting.keys()
    too_long = sum("the job ends before its work" in why for why in plan.resting.values())
    needed_nodes = ceil(request.spec.round.quorum * len(request.candidates) - 1e-9)
    assert len(plan.nodes) + too_long >= needed_nodes
    assert any(part.rounds == 1 for part in plan.nodes.values())
    for part in plan.nodes.values():
        assert 1 <= part.inner_steps <= request.spec.aware.inner_steps_max
        assert part.connections in {1, 4, 8, 16}
        assert part.upload_after_ms >= 0
        assert f"H={part.inner_steps}" in part.reason
    assert all(plan.resting.values())


@given(planning_cases())
@settings(max_examples=100, deadline=None)
def test_an_exclusion_goes_on_unless_the_quorum_needs_the_node(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    plan = plan_round(request, readings_by_node, SIZES)
    before = request.previous.nodes if request.previous else {}
    excluded_nodes = {n for n, memory in before.items() if memory.rests_until_round > request.round}
    working_count = len(plan.nodes.keys() & excluded_nodes)
    needed_nodes = max(1, ceil(request.spec.round.quorum * len(request.candidates) - 1e-9))
    assert not working_count or len(plan.nodes) <= needed_nodes


@given(planning_cases())
@settings(max_examples=100, deadline=None)
def test_a_dense_round_has_dense_updates_and_a_sparse_one_no_others(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    previous = request.previous
    request = replace(request, previous=None) if previous and not previous.span_ms else request
    plan = plan_round(request, readings_by_node, SIZES)
    are_sparse = [part.codec in SPARSE_CODECS for part in plan.nodes.values()]
    assert {part.codec for part in plan.nodes.values()} <= set(_levels(request.spec))
    if plan.is_sparse:
        assert all(are_sparse)
    elif not plan.resting:
        # Those who send dense updates may rest, of whoever is left.
        assert not all(are_sparse)
    assert plan.down in {"int4", "topk256"}
    assert plan.is_sparse or plan.down == "int4"


@given(planning_cases())
@settings(max_examples=100, deadline=None)
def test_a_deadline_leaves_time_for_the_quorum(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    plan = plan_round(request, readings_by_node, SIZES)
    is_anything_known = any(reading.step_us.count for reading in readings_by_node.values())
    assert (plan.deadline_ms > 0) == is_anything_known
    if not plan.deadline_ms:
        return
    awaited_parts = [part for part in plan.nodes.values() if part.rounds == 1]
    forecasts = sorted(part.forecast_ms for part in awaited_parts if part.forecast_ms)
    needed_nodes = max(1, ceil(request.spec.round.quorum * len(awaited_parts) - 1e-9))
    if len(forecasts) >= needed_nodes:
        assert plan.deadline_ms >= forecasts[needed_nodes - 1]


def _request(fleet: list[Truth], sharding: str) -> PlanRequest:
    job = spec(nodes=len(fleet), sharding=sharding)
    return PlanRequest(
        round=1,
        at_ms=Milliseconds(0),
        spec=job,
        candidates={node: Slot(slot) for slot, node in enumerate(names(len(fleet)))},
        samples_done=Samples(0),
        samples_total=total_samples(job),
    )


def _first_plan(fleet: list[Truth], sharding: str) -> RoundPlan:
    nodes = names(len(fleet))
    request = _request(fleet, sharding)
    # All took as long for as many steps in the round before, whatever they say.
    memories = dict.fromkeys(nodes, NodeMemory("int4", proven_step_us=50_000.0))
    request = replace(request, previous=PlanMemory(20, 0, is_sparse=False, nodes=memories))
    readings_by_node = {node: reading_of(truth) for node, truth in zip(nodes, fleet, strict=True)}
    return plan_round(request, readings_by_node, SIZES)


shardings = st.sampled_from(["iid", "dirichlet"])


@given(st.lists(steady, min_size=5, max_size=8), truths, shardings)
@settings(max_examples=75, deadline=None)
def test_nobody_waits_for_a_node_on_trial(others: list[Truth], trial: Truth, sharding: str) -> None:
    nodes = names(len(others) + 1)
    request = _request([*others, trial], sharding)
    on_trial = PlanMemory(
        20,
        0,
        is_sparse=False,
        nodes={nodes[-1]: NodeMemory("int4", rests_until_round=1, retries=1)},
    )
    request = replace(request, previous=on_trial)
    readings_by_node = {
        node: reading_of(truth) for node, truth in zip(nodes, [*others, trial], strict=True)
    }
    slower = {**readings_by_node, nodes[-1]: reading_of(with_slow_line(trial))}
    plan, later = (plan_round(request, each, SIZES) for each in (readings_by_node, slower))
    if plan.nodes.keys() != later.nodes.keys() or plan.is_sparse != later.is_sparse:
        return
    steps = [
        {node: part.inner_steps for node, part in each.nodes.items() if node != nodes[-1]}
        for each in (plan, later)
    ]
    if steps[0] == steps[1]:
        # Work that no round waits for changes, and with it when uploads begin.
        assert plan.deadline_ms == pytest.approx(later.deadline_ms, rel=0.05)


def with_slow_line(truth: Truth) -> Truth:
    return Truth(truth.step_ms, truth.up_mbit_s / 20, truth.down_mbit_s / 20, truth.rtt_ms)


@given(planning_cases())
@settings(max_examples=100, deadline=None)
def test_the_last_rounds_share_what_is_left(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    plan = plan_round(request, readings_by_node, SIZES)
    batch = request.spec.training.batch_size
    left_samples = max(request.samples_total - request.samples_done, 0)
    samples = {node: part.inner_steps * part.batch(batch) for node, part in plan.nodes.items()}
    assert all(each <= left_samples + 2 * batch for each in samples.values())
    # Work for several rounds is as much of each of them; the next plans take it into account.
    round_samples = sum(samples[node] / part.rounds for node, part in plan.nodes.items())
    assert round_samples <= left_samples + 2 * batch * len(plan.nodes)


@given(st.lists(steady, min_size=2, max_size=8), steady, shardings)
@settings(max_examples=75, deadline=None)
def test_who_claims_more_speed_than_it_is_given_work_for_changes_nothing_by_it(
    others: list[Truth], line: Truth, sharding: str
) -> None:
    fast_ms = min(other.step_ms for other in others) / 400
    plans = [
        _first_plan([*others, set_step(line, step_ms)], sharding) for step_ms in (fast_ms, 0.001)
    ]
    assert plans[0].memory.inner_steps == plans[1].memory.inner_steps
    assert plans[0].is_sparse == plans[1].is_sparse
    for node in names(len(others)):
        assert plans[0].nodes.keys() & {node} == plans[1].nodes.keys() & {node}
        if node in plans[0].nodes:
            first, second = (plan.nodes[node] for plan in plans)
            assert first.codec == second.codec
            if first.rounds > 1:
                # Work that no round waits for is made anew each time, and nobody is hurt by it.
                assert second.rounds > 1
                continue
            assert abs(first.inner_steps - second.inner_steps) <= 1 + first.inner_steps / 20


@given(st.integers(2, 20), steady, shardings)
@settings(max_examples=100, deadline=None)
def test_a_step_of_a_microsecond_costs_the_others_no_more_steps_than_it_is_given(
    others: int, truth: Truth, sharding: str
) -> None:
    honest = _first_plan([truth] * (others + 1), sharding).memory.inner_steps
    lying_steps = _first_plan(
        [truth] * others + [set_step(truth, 0.001)], sharding
    ).memory.inner_steps
    most = 8 if sharding == "iid" else 2
    assert honest * (others + 1) / (others + most) - 1 <= lying_steps <= honest


def set_step(truth: Truth, step_ms: float) -> Truth:
    return Truth(step_ms, truth.up_mbit_s, truth.down_mbit_s, truth.rtt_ms)


@given(planning_cases())
@settings(max_examples=100, deadline=None)
def test_a_batch_of_its_own_lies_within_limits_and_says_why(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    stated_batch, limits = request.spec.training.batch_size, request.spec.aware
    most = 2 if limits.inner_steps_max == 1 else 4 if request.spec.data.is_common else 1
    for part in plan_round(request, readings_by_node, SIZES).nodes.values():
        assert min(4, stated_batch) <= part.batch(stated_batch) <= most * stated_batch
        is_scaled = part.batch(stated_batch) != stated_batch and limits.inner_steps_max > 1
        assert bool(part.learning_rate) == is_scaled
        assert (f"batch {part.batch_size} of {stated_batch}" in part.reason) == bool(
            part.batch_size
        )


@given(planning_cases())
@settings(max_examples=50, deadline=None)
def test_equal_requests_have_equal_plans(
    case: tuple[PlanRequest, dict[NodeId, NodeReading]],
) -> None:
    request, readings_by_node = case
    assert plan_round(request, readings_by_node, SIZES) == plan_round(
        request, dict(readings_by_node), SIZES
    )


def _speed_of(truth: Truth) -> NodeSpeed:
    reading = reading_of(truth)
    typical = median_reading([reading])
    connections = connection_count(reading, typical, SIZES.update_bytes["int4"], 0)
    return stated_speed(reading, typical, connections, needs_line=True)


@given(steady, st.floats(1, 50), st.floats(1e4, 1e7), st.sampled_from([0.5, 0.85, 0.95]))
@settings(deadline=None)
def test_a_slower_line_never_has_a_finer_codec_and_an_update_keeps_its_budget(
    truth: Truth, times: float, computing_us: float, utilisation: float
) -> None:
    levels = ("int4", "topk256", "topk64")
    slow = replace_up(truth, truth.up_mbit_s / times)
    family = CodecFamily(levels, is_sparse=False)
    codec_levels = []
    for one in (truth, slow):
        budget = byte_budget(_speed_of(one), computing_us, utilisation)
        codec, _ = node_codec(family, NodeMemory(""), SIZES, budget)
        assert SIZES.update_bytes[codec] <= budget or codec == levels[-1]
        codec_levels.append(levels.index(codec))
    assert codec_levels[0] <= codec_levels[1]


@given(steady, st.floats(1, 50), st.floats(1e5, 1e8), st.sampled_from(["int4", "topk64"]))
@settings(deadline=None)
def test_a_slower_line_has_no_more_steps_of_the_same_round_with_the_same_codec(
    truth: Truth, times: float, span_us: float, codec: str
) -> None:
    limits = StepBounds(1, 500)
    up, down = SIZES.update_bytes[codec], SIZES.update_bytes["int4"]
    steps = []
    for one in (truth, replace_up(truth, truth.up_mbit_s / times)):
        mine = _speed_of(one)
        moving_us = mine.moving_us(up, down)
        steps.append(
            own_steps(mine.step_us, moving_us, span_us, bounds=limits, memory=NodeMemory(""))
        )
    assert steps[0] >= steps[1]


def replace_up(truth: Truth, up_mbit_s: float) -> Truth:
    return Truth(truth.step_ms, up_mbit_s, truth.down_mbit_s, truth.rtt_ms)


def _is_told(before: Sequence[object], after: Sequence[object]) -> bool:
    """Whether a change is more than one of steps by less than a quarter, as the few large nodes of
    a small fleet move its median.
    """
    changes = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    return any(
        not (isinstance(old, int) and isinstance(new, int) and old > 4 and 0.75 < new / old < 4 / 3)
        for old, new in changes
    )


def _what_nodes_notice(plan: RoundPlan) -> dict[str, Sequence[object]]:
    """What each node is told, and what all are."""
    notices: dict[str, Sequence[object]] = {
        str(n): (p.codec, p.inner_steps, p.connections) for n, p in plan.nodes.items()
    }
    return {**notices, "all": (frozenset(plan.resting), plan.down, plan.is_sparse)}


@given(
    st.lists(steady, min_size=1, max_size=6),
    st.lists(st.floats(0.95, 1.05), min_size=24, max_size=24),
)
@settings(max_examples=75, deadline=None)
def test_under_noise_of_a_twentieth_nodes_notice_two_changes_in_four_plans_at_most(
    fleet: list[Truth], noise: list[float]
) -> None:
    nodes = names(len(fleet))
    job = spec(nodes=len(nodes), rounds=10_000)
    previous: PlanMemory | None = None
    results: dict[NodeId, NodeResult] = {}
    plans = []
    for number in range(1, 6):
        request = PlanRequest(
            round=number,
            at_ms=Milliseconds(0),
            spec=job,
            candidates={node: Slot(slot) for slot, node in enumerate(nodes)},
            samples_done=Samples(0),
            samples_total=total_samples(job),
            previous=previous,
            results=results,
        )
        readings_by_node = {
            node: reading_of(truth, noise=noise[(number * len(nodes) + slot) % len(noise)])
            for slot, (node, truth) in enumerate(zip(nodes, fleet, strict=True))
        }
        plan = plan_round(request, readings_by_node, SIZES)
        previous = plan.memory
        results = {n: NodeResult(p, p.forecast_ms) for n, p in plan.nodes.items()}
        plans.append(plan)
    rests = any(plan.resting for plan in plans)
    # Work that no round waits for is made anew each time: nobody is hurt by its changes.
    unawaited_nodes = {n for plan in plans for n, part in plan.nodes.items() if part.rounds > 1}
    if not rests:
        # The first plan knows no codec that nodes hold: at the edge of a budget one more may settle
        # what it began. What goes to and fro changes three times.
        notices = [_what_nodes_notice(plan) for plan in plans[1:]]
        for name in notices[0].keys() - unawaited_nodes:
            assert sum(_is_told(*both) for both in pairwise(each[name] for each in notices)) <= 2


GOLDEN_PERMUTATION = "ee290988c009ad9d03a44892290b45f7bbf8e367e89c1aab1a3f37ef2e3a0aac"
GOLDEN_SPLIT = "81bc8daa67e592142596f9de4af81a1c016ee7b17bedb2ac225aa5aec1cbbd63"

seeds = st.integers(0, 2**63 - 1)


@given(seed=seeds, size=st.integers(1, 300), number=st.integers(0, 50))
def test_a_pass_visits_every_sample_exactly_once(seed: int, size: int, number: int) -> None:
    members = np.arange(100, 100 + size)
    visited_samples = stream_indices(members, 0, seed, [SampleRange(number * size, Samples(size))])
    assert sorted(visited_samples) == list(members)


@given(
    seed=seeds,
    size=st.integers(1, 60),
    start=st.integers(0, 500),
    counts=st.lists(st.integers(0, 90), max_size=6),
)
def test_cutting_a_stretch_into_ranges_changes_nothing(
    seed: int, size: int, start: int, counts: list[int]
) -> None:
    members = np.arange(size)
    runs, position = [], start
    for count in counts:
        runs.append(SampleRange(position, Samples(count)))
        position += count
    whole = stream_indices(members, 3, seed, [SampleRange(start, Samples(sum(counts)))])
    np.testing.assert_array_equal(stream_indices(members, 3, seed, runs), whole)


@given(
    seed=seeds,
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=200),
    alpha=st.floats(0.01, 100.0),
    share=st.floats(0.0, 1.0),
)
def test_dirichlet_partitions_are_disjoint_complete_and_never_empty(
    seed: int, labels: list[int], alpha: float, share: float
) -> None:
    partitions = 1 + round(share * (min(len(labels), 30) - 1))
    parts = partition_indices(np.array(labels), Sharding(partitions, alpha, seed))
    assert len(parts) == partitions
    assert min(map(len, parts)) > 0
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


@given(count=st.integers(1, 500), partitions=st.integers(1, 50))
def test_iid_is_one_partition_of_everything(count: int, partitions: int) -> None:
    (part,) = partition_indices(np.zeros(count, np.int64), Sharding(partitions, 0.0, 0))
    assert list(part) == list(range(count))


def test_a_small_concentration_skews_labels_and_a_large_one_does_not() -> None:
    labels = np.arange(4000) % 10
    skews = []
    for alpha in (0.05, 1000.0):
        parts = partition_indices(labels, Sharding(5, alpha, 1))
        counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
        skews.append(counts.max(axis=0).mean() / 400)
    assert skews[0] > 0.7
    assert skews[1] < 0.25


def test_passes_partitions_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(permutation(seed, partition, number, 50))
        for seed in range(3)
        for partition in range(3)
        for number in range(3)
    }
    assert len(orders) == 27


def test_a_permutation_is_the_same_everywhere_and_forever() -> None:
    order = permutation(7, 1, 2, 1797).astype("<i8")
    assert digest_of(order.tobytes()) == GOLDEN_PERMUTATION


def test_a_dirichlet_split_is_the_same_everywhere_and_forever() -> None:
    parts = partition_indices(np.arange(1797) % 10, Sharding(5, 0.3, 7))
    joined_bytes = b"".join(part.astype("<i8").tobytes() + b"|" for part in parts)
    assert digest_of(joined_bytes) == GOLDEN_SPLIT


@pytest.mark.parametrize(
    ("labels", "sharding", "reason"),
    [
        ([], Sharding(1, 0.0, 0), "the dataset is empty"),
        ([0, 1], Sharding(3, 0.5, 0), "2 samples cannot make 3 partitions"),
        ([0, 1], Sharding(2, -1.0, 0), "it must be above 0"),
        ([0, 1], Sharding(2, float("nan"), 0), "it must be above 0"),
    ],
)
def test_an_impossible_split_says_why(labels: list[int], sharding: Sharding, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partition_indices(np.array(labels, np.int64), sharding)
