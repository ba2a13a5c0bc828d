"""Memories of nodes as a plan begins: those of the plan before, with the results since then."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.plan.batches import growth_after
from coordinator.core.training.plan.decision import NodeMemory, PlanRequest
from hypergpu.ids import NodeId

EXCLUDING_CUTS = 3
"""Rounds in a row without the node's update that exclude it; a lease over several rounds counts for
all of them.
"""
_FORGOTTEN_AFTER = 64
"""Rounds of absence: a node that is back later begins like any other."""


class NodeMemories(NamedTuple):
    """Memory of each node, the round before included."""

    candidates: Mapping[NodeId, NodeMemory]
    """A process that begins anew is held to what its node did before. Otherwise a node that crashes
    each time would be tried for ever.
    """
    absentees: Mapping[NodeId, NodeMemory]
    """Nodes that are away: how often they were of no use, for a while."""
    excluded_nodes: frozenset[NodeId]
    """Candidates whose exclusion goes on in this round."""


def node_memories(request: PlanRequest) -> NodeMemories:
    """Memory of the candidates and of the nodes that are away."""
    absentees = _absentees(request)
    candidates = {
        node: replace(_memory_after(request, node), away_rounds=0) for node in request.candidates
    }
    excluded_nodes = frozenset(
        node for node, memory in candidates.items() if memory.rests_until_round > request.round
    )
    return NodeMemories(candidates, absentees, excluded_nodes)


def _absentees(request: PlanRequest) -> dict[NodeId, NodeMemory]:
    before = request.previous.nodes if request.previous is not None else {}
    absentees = {}
    for node in dict.fromkeys((*before, *request.results)):
        if node in request.candidates:
            continue
        memory = _memory_after(request, node)
        if node in request.under_way:
            absentees[node] = memory
        elif (memory.retries or memory.cut_rounds) and memory.away_rounds < _FORGOTTEN_AFTER:
            absentees[node] = replace(memory, away_rounds=memory.away_rounds + 1)
    return absentees


def _memory_after(request: PlanRequest, node: NodeId) -> NodeMemory:
    """The node's memory once the round before is counted, if the node had a part in it. A node that
    was too late, gave its shard back or was lost has no update in that round.
    """
    before = request.previous.nodes if request.previous is not None else {}
    memory, result = before.get(node, NodeMemory(codec="")), request.results.get(node)
    if result is None:
        return memory
    stated_batch = request.spec.training.batch_size
    growth = growth_after(memory.growth, result, stated_batch, request.round)
    memory = replace(memory, growth=growth)
    if result.took_ms > 0:
        steps = result.plan.inner_steps * result.plan.batch(stated_batch) / stated_batch
        proven_us = 1000.0 * result.took_ms / steps
        return replace(memory, cut_rounds=0, proven_step_us=proven_us, proven_steps=steps)
    cuts = EXCLUDING_CUTS if result.is_lapsed else 1
    return replace(memory, cut_rounds=memory.cut_rounds + cuts)
