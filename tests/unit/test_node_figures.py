"""Series by node are bounded, whatever the fleet: the rest of the nodes share one label."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.hub.node_figures import REST, SERIES_MOST, NodeFigure, bounded_series
from hypergpu.ids import NodeId


def nodes_of(count: int) -> list[NodeId]:
    return [NodeId(f"0x{number:040x}") for number in range(count)]


def figure(nodes: list[NodeId], value: float = 1.0, *, is_mean: bool = False) -> NodeFigure:
    return NodeFigure("figure", "A figure.", dict.fromkeys(nodes, value), is_mean=is_mean)


@given(count=st.integers(0, 3_000), figures=st.integers(1, 20))
def test_all_figures_together_have_at_most_a_thousand_series(count: int, figures: int) -> None:
    nodes = nodes_of(count)
    bounded_figures = bounded_series([figure(nodes)] * figures, nodes)
    assert sum(len(each.samples) for each in bounded_figures) <= SERIES_MOST
    for each in bounded_figures:
        assert sum(value for _, value in each.samples) == count


def test_a_small_fleet_has_a_series_a_node_and_no_rest() -> None:
    nodes = nodes_of(50)
    (bounded_figure,) = bounded_series([figure(nodes)], nodes)
    assert [label for label, _ in bounded_figure.samples] == nodes


def test_the_rest_is_a_sum_or_a_mean_where_a_sum_says_nothing() -> None:
    nodes = nodes_of(30)
    summed_figure, mean = bounded_series(
        [figure(nodes, 0.5), figure(nodes, 0.5, is_mean=True)], nodes, 20
    )
    assert (summed_figure.samples[-1], len(summed_figure.samples)) == ((REST, 10.5), 10)
    assert mean.samples[-1] == (REST, 0.5)


def test_a_node_without_a_value_has_no_sample() -> None:
    nodes = nodes_of(3)
    (bounded_figure,) = bounded_series([figure(nodes[1:])], nodes)
    assert [label for label, _ in bounded_figure.samples] == nodes[1:]
