"""How a node's steps are made to fit into its device's memory: fewer samples at once, then
activations that are computed again, then no work at all.

A batch in several passes is the same batch: samples, steps, weights and pay stay, and so does the
result, but for rounding and for batch norms, which see one pass each. So the batch never shrinks
for memory: with one sample at a time a smaller one would need no less.
"""

from msgspec.structs import replace

from coordinator.core.training.plan.decision import MemoryFit, MemoryUse, NodePlan
from hypergpu.jobfile.spec import JobSpec
from hypergpu.optimizer import OptimizerRule, pass_sizes
from hypergpu.units import Bytes

_USABLE = 0.8
"""Part of a device's memory that an estimate counts on: the rest is for the display, other
programs, and what allocators cannot use.
"""
_SHORTAGE = "left out: one sample at a time runs out of memory"
_RECOMPUTED = " with activation checkpointing"


def tighter_fit(plan: NodePlan, spec: JobSpec, *, can_checkpoint: bool) -> MemoryFit:
    """The fit to try next where a device ran out of memory under a plan.

    Args:
        plan: It failed.
        spec: The settings of its round.
        can_checkpoint: Whether the workload can compute activations again.
    """
    rule = fitted_rule(plan, spec)
    largest = pass_sizes(plan.batch(spec.training.batch_size), rule.micro_batch)[0]
    checkpoints = plan.checkpoints_activations
    if largest > 1:
        return MemoryFit(largest // 2, checkpoints, "a larger one ran out of memory")
    if can_checkpoint and not checkpoints:
        return MemoryFit(1, checkpoints_activations=True, why="it ran out of memory without")
    shortage = f"{_SHORTAGE}{_RECOMPUTED if checkpoints else ''}"
    return MemoryFit(1, checkpoints, shortage=shortage)


def least_use(least: MemoryUse | None, use: MemoryUse, plan: NodePlan, spec: JobSpec) -> MemoryUse:
    """The least that any step was measured to take: a node that exaggerates slows nobody, and one
    that tells too little costs others a try.

    Args:
        least: By earlier steps.
        use: Bytes before a step under the plan, and in ``sample_bytes`` those at its peak.
        plan: Of the node.
        spec: The settings of its round.
    """
    batch, micro_batch = plan.batch(spec.training.batch_size), fitted_rule(plan, spec).micro_batch
    sample_bytes = (use.sample_bytes - use.before_bytes) // pass_sizes(batch, micro_batch)[0]
    if plan.checkpoints_activations or sample_bytes <= 0 or use.before_bytes <= 0:
        return least or MemoryUse(Bytes(0), Bytes(0))
    if least is None or not least.sample_bytes:
        return MemoryUse(use.before_bytes, Bytes(sample_bytes))
    return MemoryUse(
        min(least.before_bytes, use.before_bytes), Bytes(min(least.sample_bytes, sample_bytes))
    )


def estimated_fit(
    use: MemoryUse | None, memory_bytes: Bytes, *, most: int, can_checkpoint: bool
) -> MemoryFit:
    """The fit by the memory that steps took on other devices; no limit, where nothing is known.

    Args:
        use: By steps of the job.
        memory_bytes: The device's; 0: not known.
        most: The largest batch of the job.
        can_checkpoint: Whether the workload can compute activations again.
    """
    if use is None or not use.sample_bytes or not memory_bytes:
        return MemoryFit()
    room = int(_USABLE * memory_bytes) - use.before_bytes
    fits = room // use.sample_bytes
    if fits >= most:
        return MemoryFit()
    why = f"a sample takes {_size(use.sample_bytes)} of {_size(memory_bytes)}"
    return MemoryFit(max(1, fits), can_checkpoint and fits < 1, why)


def _size(count: Bytes) -> str:
    return f"{count / 1e9:.2g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def fit_plan(plan: NodePlan, fit: MemoryFit, spec: JobSpec) -> NodePlan:
    """The plan with what fits into memory, and its reason:
    ``micro-batch 4 of 8: a larger one ran out of memory``.
    """
    batch = plan.batch(spec.training.batch_size)
    most = min(batch, spec.inner.micro_batch or batch)
    micro_batch = min(most, fit.micro_batch or most)
    if micro_batch == most and not fit.checkpoints_activations:
        return plan
    why = f"micro-batch {micro_batch} of {batch}"
    why += f"{_RECOMPUTED if fit.checkpoints_activations else ''}: {fit.why}"
    return replace(
        plan,
        micro_batch=micro_batch,
        checkpoints_activations=fit.checkpoints_activations,
        reason=f"{plan.reason}; {why}",
    )


def fitted_rule(plan: NodePlan, spec: JobSpec) -> OptimizerRule:
    """The job's optimizer with the node's own passes over a batch."""
    rule = spec.inner.rule
    sizes = [size for size in (rule.micro_batch, plan.micro_batch) if size]
    return replace(
        rule,
        micro_batch=min(sizes, default=0),
        checkpoints_activations=plan.checkpoints_activations,
    )
