"""Which samples of whose shards are differentiated."""

from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.training.trust.own_draw import (
    NODES_MOST,
    SAMPLES_EACH,
    SAMPLES_MOST,
    drawn_nodes,
    drawn_positions,
)
from coordinator.core.training.trust.weights import WHOLE
from hypergpu.assignment import SampleRange
from hypergpu.ids import NodeId
from hypergpu.units import Samples

NODES = [NodeId(f"node-{number:03}") for number in range(200)]
RANGES = (SampleRange(100, Samples(40)), SampleRange(1_000, Samples(600)))


def test_all_nodes_of_a_small_round_are_drawn() -> None:
    assert drawn_nodes("draw", TrustMemory(), NODES[:NODES_MOST]) == NODES[:NODES_MOST]


def test_of_two_hundred_nodes_newcomers_and_doubted_ones_are_drawn_first() -> None:
    honesty = dict.fromkeys(NODES, WHOLE)
    newcomers, doubted_nodes = NODES[3:6], NODES[50:54]
    for node in newcomers:
        del honesty[node]
    honesty |= dict.fromkeys(doubted_nodes, WHOLE // 3)
    chosen_nodes = drawn_nodes("draw", TrustMemory(honesty=honesty), NODES)
    assert len(chosen_nodes) == NODES_MOST
    assert set(chosen_nodes[:3]) == set(newcomers)
    assert set(chosen_nodes[3:7]) == set(doubted_nodes)


def test_over_rounds_every_trusted_node_is_drawn() -> None:
    memory = TrustMemory(honesty=dict.fromkeys(NODES, WHOLE))
    chosen_nodes = {
        node for number in range(80) for node in drawn_nodes(f"round {number}", memory, NODES)
    }
    assert chosen_nodes == set(NODES)


def test_samples_lie_within_the_shard_and_are_drawn_once() -> None:
    positions = drawn_positions("lease 1", RANGES)
    assert len(set(positions)) == SAMPLES_EACH
    assert all(100 <= each < 140 or 1_000 <= each < 1_600 for each in positions)
    assert positions == drawn_positions("lease 1", RANGES)
    assert positions != drawn_positions("lease 2", RANGES)


def test_a_shard_of_few_samples_gives_all_of_them() -> None:
    assert drawn_positions("draw", (SampleRange(5, Samples(3)),)) == (5, 6, 7)


def test_a_round_takes_no_more_samples_than_it_may() -> None:
    assert NODES_MOST * SAMPLES_EACH <= SAMPLES_MOST
