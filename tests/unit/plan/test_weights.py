from coordinator.core.plan.weights import UpdateWork, update_weights
from hypergpu.ids import NodeId
from hypergpu.units import Samples

A, B = NodeId("a"), NodeId("b")


def _works(**steps: int) -> dict[NodeId, UpdateWork]:
    return {NodeId(node): UpdateWork(Samples(32 * mine), mine) for node, mine in steps.items()}


def test_an_update_of_common_data_counts_by_its_samples() -> None:
    found = update_weights(_works(a=10, b=160), "iid")
    assert found.weights == {A: 320, B: 5120}
    assert found.scale == 1


def test_updates_of_nodes_with_own_data_count_alike_whatever_their_steps() -> None:
    found = update_weights(_works(a=40, b=60), "dirichlet")
    assert found.weights[A] == found.weights[B]
    assert 1 < found.scale < 1.25


def test_equal_steps_on_own_data_need_no_scale() -> None:
    found = update_weights(_works(a=30, b=30), "dirichlet")
    assert found.weights[A] == found.weights[B]
    assert found.scale == 1


def test_updates_of_nodes_with_own_data_count_alike_whatever_their_batches() -> None:
    found = update_weights(
        {A: UpdateWork(Samples(48), 1), B: UpdateWork(Samples(16), 1)}, "dirichlet"
    )
    assert found.weights[A] == found.weights[B]
    assert found.scale == 1


def test_two_steps_among_hundreds_are_not_blown_up() -> None:
    found = update_weights(_works(a=2, b=100, c=100), "dirichlet")
    # Unclamped, the two steps would count as much as a hundred.
    assert found.weights[A] * 10 < found.weights[B]
    assert found.scale <= 1.25
