from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.plan.balance import Contribution, balanced_batches, update_weights
from hypergpu.ids import NodeId
from hypergpu.units import Samples

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


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


def test_two_steps_among_hundreds_are_not_blown_up() -> None:
    found = update_weights(_made(a=2, b=100, c=100), "dirichlet")
    # Unclamped, the two steps would count as much as a hundred.
    assert found.weights[A] * 10 < found.weights[B]
    assert found.scale <= 1.25


def test_batches_move_halfway_from_the_slow_to_the_fast() -> None:
    batches = {A: Samples(32), B: Samples(32)}
    assert balanced_batches(batches, {A: 100.0, B: 140.0}) == {A: 35, B: 29}


def test_batches_are_left_alone_when_only_one_node_was_timed() -> None:
    batches = {A: Samples(32), B: Samples(16)}
    assert balanced_batches(batches, {A: 100.0}) == batches


def test_batches_even_out_a_node_that_is_three_times_as_slow() -> None:
    batches = {A: Samples(60), B: Samples(60), C: Samples(60)}
    speeds = {A: 1.0, B: 1.0, C: 3.0}
    for _ in range(12):
        took = {node: batches[node] * speeds[node] for node in batches}
        batches = balanced_batches(batches, took)
    took = {node: batches[node] * speeds[node] for node in batches}
    assert max(took.values()) <= 1.1 * min(took.values())


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
    found = balanced_batches(batches, {node: took for node, (_, took) in nodes.items()})
    assert sum(found.values()) == sum(batches.values())
    assert min(found.values()) >= 1
