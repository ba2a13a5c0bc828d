"""Share of work that secret duplicates do twice, among honest nodes that begin as strangers."""

from coordinator.core.duplicates import ComparedPair, RoundWorker, draw_duplicates, judge_pairs
from coordinator.core.job.state import TrustMemory, Weighing
from hypergpu.ids import NodeId

NODES, ROUNDS, SEEDS = 20, 50, 50
LIKENESS = 0.7
"""An honest pair's, as measured with equal data: docs/decisions/0025."""


def duplicate_share(seed: int) -> float:
    """Work done twice over all work of one job."""
    nodes = [NodeId(f"{number:02d}") for number in range(NODES)]
    workers = [RoundWorker(node, (20, 32, 0, "int4"), has_begun=False) for node in nodes]
    memory, count = TrustMemory(), 0
    for number in range(ROUNDS):
        pairs = draw_duplicates(f"{seed}/{number}", memory.duplicates, workers)
        count += len(pairs)
        whole = Weighing(clips={}, votes={}, reasons={}, memory=memory)
        compared = [ComparedPair(pair, LIKENESS) for pair in pairs.items()]
        memory = judge_pairs(whole, compared).memory
    return count / (NODES * ROUNDS)
