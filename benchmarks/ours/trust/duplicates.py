"""Share of work that secret duplicates do twice or leave undone, among honest nodes."""

from collections.abc import Sequence

from coordinator.core.training.job.trust_memory import DuplicateMemory, TrustMemory, Weighing
from coordinator.core.training.plan.common_work import is_timed, lesser_work
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.trust.duplicates import (
    ComparedPair,
    RoundWorker,
    draw_duplicates,
    judge_pairs,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

ROUNDS, SEEDS, BATCH = 50, 50, 32
LIKENESS = 0.7
"""An honest pair's, as measured with equal data: docs/decisions/0025."""
EQUAL = (20,) * 20
UNEQUAL = (5, 5, 5, 10, 10, 10, 20, 20, 20, 20, 20, 20, 20, 20, 40, 40, 40, 80, 80, 80)
"""Inner steps of a round, by the nodes' speeds."""
SPAN_MS = 30_000


def duplicate_share(seed: int, steps: Sequence[int] = EQUAL) -> float:
    """Work done twice over all work of one job of nodes that begin as strangers."""
    return _lost_share(seed, steps, TrustMemory())


def trusted_share(seed: int, steps: Sequence[int]) -> float:
    """Work done twice or left undone, of one job of nodes that earlier pairs speak for."""
    matches = dict.fromkeys(_names(steps), 2)
    duplicate_memory = DuplicateMemory(matches=matches, likeness=(LIKENESS,) * 3)
    return _lost_share(seed, steps, TrustMemory(duplicates=duplicate_memory))


def _names(steps: Sequence[int]) -> list[NodeId]:
    return [NodeId(f"{number:02d}") for number in range(len(steps))]


def _lost_share(seed: int, steps: Sequence[int], memory: TrustMemory) -> float:
    plans = {
        node: NodePlan(
            count,
            "int4",
            "",
            forecast_ms=Milliseconds(SPAN_MS),
            step_us=SPAN_MS * 1000 // count,
        )
        for node, count in zip(_names(steps), steps, strict=True)
    }
    workers = [RoundWorker(node, plan, has_begun=False) for node, plan in plans.items()]
    lost_steps = 0.0
    for number in range(ROUNDS):
        pairs = draw_duplicates(f"{seed}/{number}", memory.duplicates, workers, BATCH)
        timed_nodes: set[NodeId] = set()
        for pair in pairs.items():
            for node, other in (pair, pair[::-1]):
                common_work = lesser_work(plans[node], plans[other], BATCH)
                lost_steps += plans[node].inner_steps - common_work.inner_steps / 2
                timed_nodes |= {node} if is_timed(common_work) else set()
        whole = Weighing(clips={}, votes={}, reasons={}, memory=memory)
        compared_pairs = [ComparedPair(pair, LIKENESS) for pair in pairs.items()]
        memory = judge_pairs(whole, compared_pairs, timed=timed_nodes).memory
    return lost_steps / (ROUNDS * sum(steps))
