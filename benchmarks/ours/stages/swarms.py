"""Random swarms of unequal nodes, and the placements that people make without a solver."""

import random

from hypergpu.rings.placement import PlacementProblem, StageOffer, StageShare, relay_hops

_ROOMS = (3, 6, 10, 14)
"""Layers of 32 that a node's memory holds."""


def random_swarm(draws: random.Random, nodes: int, layers: int) -> PlacementProblem:
    """Nodes of log-normal speeds at homes with round trips of 8 to 80 ms, which hold all layers."""
    while True:
        offers = [
            StageOffer(draws.lognormvariate(6.8, 0.7), max(1, layers * draws.choice(_ROOMS) // 32))
            for _ in range(nodes)
        ]
        trips_us = [draws.uniform(8_000, 80_000) for _ in range(nodes)]
        if sum(offer.layers_most for offer in offers) >= layers:
            return PlacementProblem(layers, offers, relay_hops(trips_us))


def equal_split(draws: random.Random, problem: PlacementProblem) -> list[StageShare]:
    """Equal shares on all nodes in random order; what does not fit goes to the next with room."""
    nodes, layers = len(problem.offers), problem.layers
    order = draws.sample(range(nodes), nodes)
    shares = {node: layers // nodes + (place < layers % nodes) for place, node in enumerate(order)}
    excess = 0
    for node in order:
        room = problem.offers[node].layers_most
        excess += max(0, shares[node] - room)
        shares[node] = min(shares[node], room)
    for node in order:
        more = min(excess, problem.offers[node].layers_most - shares[node])
        shares[node], excess = shares[node] + more, excess - more
    return [StageShare(node, shares[node]) for node in order if shares[node]]
