from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.measure.reading import Estimate, NodeReading
from coordinator.core.plan.balance import (
    Contribution,
    balanced_batches,
    batch_limits,
    own_batches,
    update_weights,
)
from coordinator.core.plan.decision import NodeMemory
from coordinator.core.plan.spreading import Bounds
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Aware, JobSpec
from hypergpu.units import Samples
from tests.unit.plan.fleet import spec

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LIMITS = Bounds(1, 1000)
EACH_STEP = spec(nodes=3, inner_steps=1, aware=Aware(inner_steps_max=1))
"""Its batch is 32."""


def _made(**steps: int) -> dict[NodeId, Contribution]:
    return {NodeId(node): Contribution(Samples(32 * mine), mine) for node, mine in steps.items()}


def test_an_update_of_common_data_counts_by_its_samples() -> None:
    found = update_weights(_made(a=10, b=160), "iid")
    assert found.weights == {A: 320, B: 5120}
    assert found.scale == 1


def test_updates_of_nodes_with_own_data_count_alike_whatever_their_steps() -> None:
    found = update_weights(_made(a=40, b=60), "dirichlet")
    assert found.weights[A] == found.weights[B]
    assert 1 < found.scale < 1.25


def test_equal_steps_on_own_data_need_no_scale() -> None:
    found = update_weights(_made(a=30, b=30), "dirichlet")
    assert found.weights[A] == found.weights[B]
    assert found.scale == 1


def test_updates_of_nodes_with_own_data_count_alike_whatever_their_batches() -> None:
    found = update_weights(
        {A: Contribution(Samples(48), 1), B: Contribution(Samples(16), 1)}, "own"
    )
    assert found.weights[A] == found.weights[B]
    assert found.scale == 1


def test_two_steps_among_hundreds_are_not_blown_up() -> None:
    found = update_weights(_made(a=2, b=100, c=100), "dirichlet")
    # Unclamped, the two steps would count as much as a hundred.
    assert found.weights[A] * 10 < found.weights[B]
    assert found.scale <= 1.25


def test_batches_move_halfway_from_the_slow_to_the_fast() -> None:
    batches = {A: Samples(32), B: Samples(32)}
    assert balanced_batches(batches, {A: 100.0, B: 140.0}, LIMITS) == {A: 35, B: 29}


def test_batches_are_left_alone_when_only_one_node_was_timed() -> None:
    batches = {A: Samples(32), B: Samples(16)}
    assert balanced_batches(batches, {A: 100.0}, LIMITS) == batches


def test_batches_even_out_a_node_that_is_three_times_as_slow() -> None:
    batches = {A: Samples(60), B: Samples(60), C: Samples(60)}
    speeds = {A: 1.0, B: 1.0, C: 3.0}
    for _ in range(12):
        took = {node: batches[node] * speeds[node] for node in batches}
        batches = balanced_batches(batches, took, LIMITS)
    took = {node: batches[node] * speeds[node] for node in batches}
    assert max(took.values()) <= 1.1 * sum(took.values()) / 3


def test_batches_stay_as_they_are_for_a_step_that_takes_little_longer() -> None:
    batches = {A: Samples(40), B: Samples(24)}
    assert balanced_batches(batches, {A: 100.0, B: 120.0}, LIMITS) == batches


def test_a_batch_stops_at_its_limit_and_the_others_take_what_is_left() -> None:
    batches = {A: Samples(60), B: Samples(32), C: Samples(4)}
    found = balanced_batches(batches, {A: 50.0, B: 100.0, C: 150.0}, Bounds(4, 64))
    assert found == {A: 64, B: 28, C: 4}


@given(
    st.dictionaries(
        st.sampled_from([A, B, C]),
        st.tuples(st.integers(1, 500), st.floats(1, 1e6)),
        min_size=1,
    )
)
def test_batches_keep_their_sum_and_nobody_has_none(
    nodes: dict[NodeId, tuple[int, float]],
) -> None:
    batches = {node: Samples(batch) for node, (batch, _) in nodes.items()}
    took = {node: took for node, (_, took) in nodes.items()}
    found = balanced_batches(batches, took, LIMITS)
    assert sum(found.values()) == sum(batches.values())
    assert min(found.values()) >= 1


def _readings(**step_ms: float) -> dict[NodeId, NodeReading]:
    return {
        NodeId(node): NodeReading(step_us=Estimate(1000 * mine, count=9))
        for node, mine in step_ms.items()
    }


def _sizes(job: JobSpec, rounds: int, readings: dict[NodeId, NodeReading]) -> dict[NodeId, int]:
    """The batches after so many plans."""
    sizes = dict.fromkeys(readings, 0)
    for _ in range(rounds):
        memories = {node: NodeMemory("int4", batch_size=size) for node, size in sizes.items()}
        sizes = {node: mine.size for node, mine in own_batches(job, memories, readings).items()}
    return sizes


def test_a_job_with_more_than_one_inner_step_states_the_batch_of_every_node() -> None:
    assert _sizes(spec(nodes=3), 3, _readings(a=50, b=50, c=150)) == {A: 0, B: 0, C: 0}


def test_a_node_three_times_as_slow_comes_to_a_third_of_a_batch() -> None:
    readings = _readings(a=50, b=50, c=150)
    assert _sizes(EACH_STEP, 1, readings) == {A: 37, B: 36, C: 23}
    sizes = _sizes(EACH_STEP, 12, readings)
    assert sizes == _sizes(EACH_STEP, 40, readings)
    assert sum(sizes.values()) == 96
    assert 3 * sizes[C] <= 1.1 * sizes[A] <= 1.25 * 3 * sizes[C]


def test_a_batch_of_its_own_says_why() -> None:
    memories = {node: NodeMemory("int4") for node in (A, B)}
    found = own_batches(EACH_STEP, memories, _readings(a=50, b=150))
    assert found[A].reason == "batch 40 of 32: a full one takes it 0.5 times the mean"
    assert found[B].reason == "batch 24 of 32: a full one takes it 1.5 times the mean"
    assert found[B].share == 24 / 32
    unmeasured = {A: NodeMemory("int4", batch_size=40), B: NodeMemory("int4", batch_size=24)}
    assert own_batches(EACH_STEP, unmeasured, {})[A].reason == "batch 40 of 32"
    assert own_batches(EACH_STEP, memories, _readings(a=50, b=50))[A].reason == ""


def test_a_node_whose_update_was_missing_has_less_to_do() -> None:
    memories = {A: NodeMemory("int4"), B: NodeMemory("int4", cut_rounds=1)}
    found = own_batches(EACH_STEP, memories, _readings(a=50, b=50))
    assert found[B].size < 32 < found[A].size


def test_what_a_node_that_went_had_been_given_is_shared_by_the_others() -> None:
    memories = {A: NodeMemory("int4", batch_size=24), B: NodeMemory("int4", batch_size=24)}
    found = own_batches(EACH_STEP, memories, {})
    assert [mine.size for mine in found.values()] == [32, 32]


def test_batches_stray_as_far_as_inner_steps_may_and_no_further_than_twice() -> None:
    own_data = spec(nodes=3, sharding="dirichlet", aware=Aware(inner_steps_max=1))
    assert batch_limits(EACH_STEP) == Bounds(2, 64)
    assert batch_limits(own_data) == Bounds(16, 64)


@given(
    st.dictionaries(
        st.sampled_from([A, B, C]),
        st.tuples(st.integers(0, 200), st.floats(0.1, 1e5), st.integers(0, 4)),
        min_size=1,
    ),
    st.sampled_from(["iid", "dirichlet"]),
    st.integers(1, 100),
)
def test_own_batches_are_as_many_samples_as_the_jobs_whatever_came_before(
    nodes: dict[NodeId, tuple[int, float, int]], sharding: str, stated: int
) -> None:
    job = spec(nodes=3, sharding=sharding, aware=Aware(inner_steps_max=1))
    job = replace(job, training=replace(job.training, batch_size=stated))
    memories = {
        node: NodeMemory("int4", batch_size=held, cut_rounds=cuts)
        for node, (held, _, cuts) in nodes.items()
    }
    readings = _readings(**{node: step_ms for node, (_, step_ms, _) in nodes.items()})
    found = own_batches(job, memories, readings)
    limits = batch_limits(job)
    assert sum(mine.size for mine in found.values()) == stated * len(nodes)
    assert all(1 <= limits.least <= mine.size <= limits.most for mine in found.values())
