"""Which nodes hold how many of a model's layers, and in which order: the best placement there is.

A token goes around the ring once, so that stages and hops add up to its latency; a stream of
micro-batches is as slow as the slowest of them. Both aims are solved exactly by a dynamic programme
over (nodes used, last node), whose value is a vector over the layers placed so far. Cost:
O(2^n n (n + r) L) for n nodes of r layers each and L layers in all, so that `place_layers` first
takes a shortlist of many nodes.

References:
    Bellman 1962, Held and Karp 1962 (programme over subsets).
"""

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EXACT_NODES_MOST = 12
"""Nodes among which the best placement is found for certain."""
_Costs = NDArray[np.float64]


class PlacementAim(Enum):
    """Quantity that a placement minimizes."""

    LATENCY = "latency"
    """Time of one token around the ring: stages and hops add up."""
    THROUGHPUT = "throughput"
    """Time between two messages of a full ring: that of its slowest stage or hop."""


class StageOffer(NamedTuple):
    """What a node could hold, and how fast."""

    layer_us: float
    """Time of one layer."""
    layers_most: int
    """Layers that its memory holds."""
    fixed_us: float = 0.0
    """Time of a pass beside its layers."""


class PlacementProblem(NamedTuple):
    """Layers that are to be placed on nodes."""

    layers: int
    offers: Sequence[StageOffer]
    hop_us: Sequence[Sequence[float]]
    """Time from a node to another; index ``len(offers)`` is whoever drives the ring."""
    aim: PlacementAim = PlacementAim.LATENCY
    stages: int | None = None
    """So many nodes exactly; None: any number."""


class StageShare(NamedTuple):
    """A node's part of a placement."""

    offer: int
    """Index of its offer."""
    layers: int


class Placement(NamedTuple):
    """Nodes in the order of the ring."""

    cost_us: float
    shares: tuple[StageShare, ...]


class _Table(NamedTuple):
    """Least costs: ``costs[nodes, last, layers]``, nodes as bits of a number."""

    costs: _Costs
    hops: _Costs
    add: np.ufunc
    own: tuple[_Costs, ...]
    """Time of each node with so many layers, from none, which is infinite."""


def placement_cost(problem: PlacementProblem, shares: Sequence[StageShare]) -> float:
    """Cost of one placement, whoever made it."""
    driver = len(problem.offers)
    places = [driver, *(share.offer for share in shares), driver]
    hops = [problem.hop_us[first][second] for first, second in pairwise(places)]
    offers = problem.offers
    stages = [
        offers[share.offer].fixed_us + offers[share.offer].layer_us * share.layers
        for share in shares
    ]
    is_latency = problem.aim is PlacementAim.LATENCY
    return sum((*hops, *stages)) if is_latency else max((*hops, *stages))


def shortfall(problem: PlacementProblem) -> int:
    """Layers for which the nodes have no memory, however they are placed."""
    rooms = sorted((offer.layers_most for offer in problem.offers), reverse=True)
    return max(0, problem.layers - sum(rooms[: problem.stages]))


def place_layers(problem: PlacementProblem) -> Placement | None:
    """The best placement; of more than `EXACT_NODES_MOST` nodes the best that a search finds.

    Args:
        problem: With at least one layer.

    Returns:
        None where no placement holds all layers.
    """
    if shortfall(problem):
        return None
    indices = list(range(len(problem.offers)))
    if len(indices) <= EXACT_NODES_MOST:
        return _solve_among(problem, indices)
    return _search(problem)


def _search(problem: PlacementProblem) -> Placement | None:
    """Solve for a shortlist, then for others in place of nodes that were not used."""
    order = sorted(range(len(problem.offers)), key=lambda index: _rank(problem, index))
    shortlist = _roomy_shortlist(problem, order)
    best = _solve_among(problem, shortlist)
    others = [index for index in order if index not in shortlist]
    while others and best is not None:
        used_offers = [share.offer for share in best.shares]
        candidates = others[: EXACT_NODES_MOST - len(used_offers)]
        if not candidates:
            return best
        others = others[len(candidates) :]
        other = _solve_among(problem, [*used_offers, *candidates])
        if other is not None and other.cost_us < best.cost_us:
            best = other
    return best


def _rank(problem: PlacementProblem, index: int) -> float:
    """About the time of a layer on a node, with its share of the way there and back."""
    offer, driver = problem.offers[index], len(problem.offers)
    way_us = problem.hop_us[driver][index] + problem.hop_us[index][driver]
    room = min(max(1, offer.layers_most), problem.layers)
    return offer.layer_us + (way_us + offer.fixed_us) / room


def _roomy_shortlist(problem: PlacementProblem, order: Sequence[int]) -> list[int]:
    """The first of an order, with larger ones for the last where they would not hold all."""
    shortlist = list(order[:EXACT_NODES_MOST])
    by_room = sorted(order, key=lambda index: -problem.offers[index].layers_most)
    most = problem.stages or EXACT_NODES_MOST
    for place in reversed(range(EXACT_NODES_MOST)):
        rooms = sorted((problem.offers[index].layers_most for index in shortlist), reverse=True)
        if sum(rooms[:most]) >= problem.layers:
            break
        shortlist[place] = next(index for index in by_room if index not in shortlist)
    return shortlist


def _solve_among(problem: PlacementProblem, indices: Sequence[int]) -> Placement | None:
    """The best placement on some of the nodes."""
    places = [*indices, len(problem.offers)]
    part = problem._replace(
        offers=[problem.offers[index] for index in indices],
        hop_us=[[problem.hop_us[first][second] for second in places] for first in places],
    )
    table = _filled_table(part)
    driver = len(indices)
    ends = table.add(table.costs[:, :, part.layers], table.hops[None, :driver, driver])
    if part.stages is not None:
        sizes = np.array([nodes.bit_count() for nodes in range(1 << driver)])
        ends[sizes != part.stages] = np.inf
    nodes, last = (int(each) for each in np.unravel_index(ends.argmin(), ends.shape))
    if not np.isfinite(ends[nodes, last]):
        return None
    shares = tuple(
        StageShare(indices[share.offer], share.layers)
        for share in _shares_back_from(table, part, nodes, last)
    )
    return Placement(placement_cost(problem, shares), shares)


def _filled_table(problem: PlacementProblem) -> _Table:
    count, layers = len(problem.offers), problem.layers
    add = np.add if problem.aim is PlacementAim.LATENCY else np.maximum
    costs = np.full((1 << count, count, layers + 1), np.inf)
    hops = np.array(problem.hop_us, np.float64)
    own = list[_Costs]()
    for offer in problem.offers:
        counts = np.arange(min(offer.layers_most, layers) + 1, dtype=np.float64)
        times: _Costs = offer.fixed_us + offer.layer_us * counts
        times[0] = np.inf  # a node of the ring takes one layer at least
        own.append(times)
    table = _Table(costs, hops, add, tuple(own))
    by_size: dict[int, list[int]] = {}
    for nodes in range(1, 1 << count):
        by_size.setdefault(nodes.bit_count(), []).append(nodes)
    for size in range(1, min(count, problem.stages or count) + 1):
        for last in range(count):
            subsets = np.array([nodes for nodes in by_size[size] if nodes >> last & 1])
            before = _costs_before(table, subsets ^ (1 << last), last)
            costs[subsets, last] = _with_layers(table, before, last)
    return table


def _costs_before(table: _Table, nodes: NDArray[np.int64], last: int) -> _Costs:
    """Least cost up to the arrival at a node, ``[subsets, layers]``, behind each set of nodes."""
    driver = table.hops.shape[0] - 1
    if not nodes.any():
        costs = np.full((len(nodes), table.costs.shape[2]), np.inf)
        costs[:, 0] = table.add(0.0, table.hops[driver, last])
        return costs
    arrivals = table.add(table.costs[nodes], table.hops[None, :driver, last, None])
    least: _Costs = arrivals.min(axis=1)
    return least


def _with_layers(table: _Table, before: _Costs, last: int) -> _Costs:
    """Least cost once a node has taken the number of layers that is best for it."""
    costs = np.full_like(before, np.inf)
    for count in range(1, len(table.own[last])):
        totals = table.add(before[:, :-count], table.own[last][count])
        np.minimum(costs[:, count:], totals, out=costs[:, count:])
    return costs


def _shares_back_from(
    table: _Table, problem: PlacementProblem, nodes: int, last: int
) -> list[StageShare]:
    """The ring that a cost belongs to, found from its end."""
    shares, layers = list[StageShare](), problem.layers
    while nodes:
        rest = nodes ^ (1 << last)
        before = _costs_before(table, np.array([rest]), last)[0]
        count_most = min(len(table.own[last]) - 1, layers)
        totals = [
            table.add(before[layers - n], table.own[last][n]) for n in range(1, count_most + 1)
        ]
        count = int(np.argmin(totals)) + 1
        shares.append(StageShare(last, count))
        layers -= count
        if rest:
            driver = table.hops.shape[0] - 1
            arrivals = table.add(table.costs[rest, :, layers], table.hops[:driver, last])
            last = int(arrivals.argmin())
        nodes = rest
    return shares[::-1]


def relay_hops(round_trips_us: Sequence[float]) -> list[list[float]]:
    """Times of hops that all go through whoever drives the ring.

    Args:
        round_trips_us: Between each node and the driver.

    Returns:
        As `PlacementProblem.hop_us`: half a round trip up, and half of the other's down.
    """
    ways = [*(each / 2 for each in round_trips_us), 0.0]
    return [
        [0.0 if first == second else ways[first] + ways[second] for second in range(len(ways))]
        for first in range(len(ways))
    ]
