"""The plan of a round of which nothing is known yet: a job's first, or one after a restart.

A job's first round is sparse where the job allows it. That is little to move over lines that nobody
has measured, enough to measure them by, and no worse to begin with: see docs/log.md.
"""

from msgspec.structs import replace

from coordinator.core.training.plan.batches import held_batch
from coordinator.core.training.plan.codecs import allowed_codecs
from coordinator.core.training.plan.decision import (
    FINEST,
    ModelSizes,
    NodePlan,
    PlanMemory,
    RoundPlan,
    opening_quorum,
)
from coordinator.core.training.plan.inner_steps import fit_steps
from coordinator.core.training.plan.participation import still_resting
from coordinator.core.training.plan.prefetch import prefetch_limit
from coordinator.core.training.plan.reasons import unmeasured_reason, with_reason
from coordinator.core.training.plan.speeds import RoundSpeeds
from hypergpu.jobfile.spec import SPARSE_CODECS, JobSpec
from hypergpu.units import Milliseconds

_FIRST_STEPS = 1
"""Steps of a round before which nothing is known: a node may be 64 times slower than another."""


def unmeasured_plan(speeds: RoundSpeeds) -> RoundPlan:
    """The user's own H for all, or the last plan's."""
    request, spec, sizes = speeds.request, speeds.request.spec, speeds.sizes
    previous, most, deadline_ms = (
        request.previous,
        spec.aware.inner_steps_max,
        spec.round.deadline_ms,
    )
    steps = min(most, spec.training.inner_steps)
    if previous is None:
        steps = min(steps, _FIRST_STEPS)
    if previous is None or spec.aware.takes_as_stated("codec.up"):
        codec = _first_codec(spec, sizes)
    else:
        codec = spec.aware.sparsest if previous.is_sparse else FINEST
    if previous is None:
        is_sparse = codec in SPARSE_CODECS
        down = spec.codec.down if spec.aware.takes_as_stated("codec.down") else codec
        previous = PlanMemory(steps, request.round, is_sparse=is_sparse, down=down)
    memories = speeds.memories
    resting_reasons = still_resting(request, memories, speeds.readings)
    working_memories = {
        n: memory for n, memory in memories.candidates.items() if n not in resting_reasons
    }
    full_steps = {
        node: min(most, memory.inner_steps or steps) for node, memory in working_memories.items()
    }
    batches = {node: held_batch(spec, memory) for node, memory in working_memories.items()}
    batch_sizes = {node: batch.size for node, batch in batches.items()}
    fitted_steps = fit_steps(full_steps, batch_sizes, request.samples_total - request.samples_done)
    nodes = {}
    for node, memory in working_memories.items():
        batch = batches[node]
        is_of_family = (memory.codec in SPARSE_CODECS) == previous.is_sparse
        plan = NodePlan(
            inner_steps=fitted_steps[node],
            codec=memory.codec if memory.codec and is_of_family else codec,
            reason=batch.reason,
            connections=speeds.connections[node],
            batch_size=batch.size if batch.size != spec.training.batch_size else 0,
            learning_rate=batch.learning_rate,
            prefetch_steps=prefetch_limit(spec, fitted_steps[node]),
        )
        nodes[node] = with_reason(plan, up_bits_per_s=0, deadline_ms=deadline_ms)
    return RoundPlan(
        round=request.round,
        nodes=nodes,
        resting=resting_reasons,
        deadline_ms=Milliseconds(deadline_ms),
        down=previous.down or FINEST,
        is_sparse=previous.is_sparse,
        memory=replace(previous, nodes={**memories.absentees, **memories.candidates}),
        reason=unmeasured_reason(min(most, previous.inner_steps), codec, deadline_ms),
        updates_needed=opening_quorum(request, nodes),
    )


def _first_codec(spec: JobSpec, sizes: ModelSizes) -> str:
    """Codec of a job's first round: the finest of the sparse ones, or the one that it states."""
    codecs = allowed_codecs(spec, sizes)
    return next((level for level in codecs if level in SPARSE_CODECS), codecs[0])
