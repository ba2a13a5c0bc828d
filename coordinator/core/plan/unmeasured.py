"""The plan of a round of which nothing is known yet: a job's first, or one after a restart.

A job's first round is sparse where the job allows it. That is little to move over lines that nobody
has measured, enough to measure them by, and no worse to begin with: see docs/log.md.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.network.reading import NodeReading, median_reading
from coordinator.core.plan.batches import batch_rate, held_batch
from coordinator.core.plan.codecs import FINEST, allowed_codecs
from coordinator.core.plan.decision import (
    ModelSizes,
    NodePlan,
    PlanMemory,
    PlanRequest,
    RoundPlan,
    opening_quorum,
)
from coordinator.core.plan.median_node import node_reason, unmeasured_reason
from coordinator.core.plan.node_work import fit_steps, prefetch_limit
from coordinator.core.plan.participation import absentees, candidate_memories, still_resting
from coordinator.core.plan.speeds import connection_count, stated_connections
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import SPARSE_CODECS, JobSpec
from hypergpu.units import Milliseconds

_FIRST_STEPS = 1
"""Steps of a round before which nothing is known: a node may be 64 times slower than another."""


def unmeasured_plan(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundPlan:
    """The user's own H for all, or what was planned last. Arguments as of `plan_round`."""
    previous = request.previous
    most, deadline_ms = request.spec.aware.inner_steps_max, request.spec.round.deadline_ms
    steps = min(most, request.spec.training.inner_steps)
    if previous is None:
        steps = min(steps, _FIRST_STEPS)
    if previous is None or request.spec.aware.takes_as_stated("codec.up"):
        codec = _first_codec(request.spec, sizes)
    else:
        codec = request.spec.aware.sparsest if previous.is_sparse else FINEST
    if previous is None:
        is_sparse = codec in SPARSE_CODECS
        down = (
            request.spec.codec.down if request.spec.aware.takes_as_stated("codec.down") else codec
        )
        previous = PlanMemory(steps, request.round, is_sparse=is_sparse, down=down)
    memories = candidate_memories(request)
    resting = still_resting(request, memories, readings)
    working = {node: memory for node, memory in memories.items() if node not in resting}
    asked = {node: min(most, memory.inner_steps or steps) for node, memory in working.items()}
    stated = request.spec.training.batch_size
    batches = {node: held_batch(request.spec, memory) for node, memory in working.items()}
    sizes_ = {node: batch.size for node, batch in batches.items()}
    given = fit_steps(asked, sizes_, request.samples_total - request.samples_done)
    usual = median_reading(readings[node] for node in request.candidates if node in readings)
    nodes = {}
    for node, memory in working.items():
        reading = readings.get(node, NodeReading())
        is_of_family = (memory.codec in SPARSE_CODECS) == previous.is_sparse
        plan = NodePlan(
            inner_steps=given[node],
            codec=memory.codec if memory.codec and is_of_family else codec,
            reason=batches[node].reason,
            connections=stated_connections(request.spec)
            or connection_count(reading, usual, sizes.update_bytes[FINEST], memory.connections),
            batch_size=batches[node].size if batches[node].size != stated else 0,
            learning_rate=batch_rate(request.spec, batches[node].size),
            prefetch_steps=prefetch_limit(request.spec, given[node]),
        )
        reason = node_reason(plan, up_bits_per_s=0, deadline_ms=deadline_ms)
        nodes[node] = replace(plan, reason=reason)
    return RoundPlan(
        round=request.round,
        nodes=nodes,
        resting=resting,
        deadline_ms=Milliseconds(deadline_ms),
        down=previous.down or FINEST,
        is_sparse=previous.is_sparse,
        memory=replace(previous, nodes={**absentees(request), **memories}),
        reason=unmeasured_reason(min(most, previous.inner_steps), codec, deadline_ms),
        updates_needed=opening_quorum(request, nodes),
    )


def _first_codec(spec: JobSpec, sizes: ModelSizes) -> str:
    """Codec of a job's first round: the finest of the sparse ones, or the one that it states."""
    allowed = allowed_codecs(spec, sizes)
    return next((level for level in allowed if level in SPARSE_CODECS), allowed[0])
