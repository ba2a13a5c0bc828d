"""The solver of placements against every placement there is."""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.rings.placement import (
    EXACT_NODES_MOST,
    Placement,
    PlacementAim,
    PlacementProblem,
    StageOffer,
    StageShare,
    place_layers,
    placement_cost,
    relay_hops,
    shortfall,
)

TIMES = st.integers(1, 2_000).map(float)


@st.composite
def problems(draw: st.DrawFn, nodes_most: int = 4, layers_most: int = 7) -> PlacementProblem:
    count = draw(st.integers(1, nodes_most))
    offers = [
        StageOffer(draw(TIMES), draw(st.integers(1, 5)), draw(st.sampled_from([0.0, 50.0])))
        for _ in range(count)
    ]
    row = st.lists(TIMES, min_size=count + 1, max_size=count + 1)
    hops = draw(st.lists(row, min_size=count + 1, max_size=count + 1))
    stages = draw(st.none() | st.integers(1, count))
    aim = draw(st.sampled_from(PlacementAim))
    return PlacementProblem(draw(st.integers(1, layers_most)), offers, hops, aim, stages)


def all_placements(problem: PlacementProblem) -> Iterator[tuple[StageShare, ...]]:
    sizes = [problem.stages] if problem.stages else range(1, len(problem.offers) + 1)
    for size in sizes:
        for order in permutations(range(len(problem.offers)), size):
            for cuts in combinations(range(1, problem.layers), size - 1):
                counts = [end - first for first, end in pairwise((0, *cuts, problem.layers))]
                shares = tuple(map(StageShare, order, counts))
                if all(each.layers <= problem.offers[each.offer].layers_most for each in shares):
                    yield shares


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_placement_is_the_best_of_all_that_there_are(problem: PlacementProblem) -> None:
    costs = [placement_cost(problem, shares) for shares in all_placements(problem)]
    placement = place_layers(problem)
    if placement is None:
        assert not costs
        return
    assert abs(placement.cost_us - min(costs)) <= 1e-6 * min(costs)
    check_whole(problem, placement)


def check_whole(problem: PlacementProblem, placement: Placement) -> None:
    shares = placement.shares
    assert sum(each.layers for each in shares) == problem.layers
    assert len({each.offer for each in shares}) == len(shares) == (problem.stages or len(shares))
    assert all(0 < each.layers <= problem.offers[each.offer].layers_most for each in shares)


@given(st.integers(0, 1_000), st.integers(13, 18))
@settings(max_examples=5, deadline=None)
def test_many_nodes_are_placed_no_worse_than_the_fastest_alone(seed: int, count: int) -> None:
    offers = [
        StageOffer(1.0 + (seed * 7919 + index * 104729) % 97, 2 + (seed + index) % 4)
        for index in range(count)
    ]
    trips = [float((seed + 31 * index) % 400) for index in range(count)]
    problem = PlacementProblem(16, offers, relay_hops(trips))
    placement = place_layers(problem)
    assert placement is not None
    check_whole(problem, placement)
    fastest = sorted(range(count), key=lambda index: offers[index].layer_us)
    fastest = fastest[:EXACT_NODES_MOST]
    part = PlacementProblem(
        16, [offers[each] for each in fastest], relay_hops([trips[each] for each in fastest])
    )
    alone = place_layers(part)
    assert alone is None or placement.cost_us <= 1.5 * alone.cost_us


@given(problems(nodes_most=3))
@settings(max_examples=50, deadline=None)
def test_what_has_no_room_is_told_in_layers(problem: PlacementProblem) -> None:
    lacking_layers = shortfall(problem)
    if not lacking_layers:
        return
    assert place_layers(problem) is None
    smaller = problem.layers - lacking_layers
    if smaller >= (problem.stages or 1):
        assert place_layers(problem._replace(layers=smaller)) is not None
