"""How a node's steps are made to fit into its device's memory: fewer samples at once, then
activations that are computed again, then no work at all.

A batch in several passes is the same batch: samples, steps, weights and pay stay, and so does the
result, but for rounding and for batch norms, which see one pass each. So the batch never shrinks
for memory: with one sample at a time a smaller one would need no less.
"""

from msgspec.structs import replace

from coordinator.core.plan.decision import MemoryFit, NodePlan
from hypergpu.jobfile.spec import JobSpec
from hypergpu.optimizer import OptimizerRule, pass_sizes

_SHORTAGE = "left out: one sample at a time runs out of memory"
_RECOMPUTED = " with activation checkpointing"


def tighter_fit(plan: NodePlan, spec: JobSpec, *, can_checkpoint: bool) -> MemoryFit:
    """What to try next where a device ran out of memory under a plan.

    Args:
        plan: It failed.
        spec: The settings of its round.
        can_checkpoint: Whether the workload can compute activations again.
    """
    rule = fitted_rule(plan, spec)
    largest = pass_sizes(plan.batch(spec.training.batch_size), rule.micro_batch)[0]
    checkpoints = plan.checkpoints_activations
    if largest > 1:
        return MemoryFit(largest // 2, checkpoints)
    if can_checkpoint and not checkpoints:
        return MemoryFit(1, checkpoints_activations=True)
    return MemoryFit(1, checkpoints, f"{_SHORTAGE}{_RECOMPUTED if checkpoints else ''}")


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
    if fit.checkpoints_activations:
        why += f"{_RECOMPUTED}: it ran out of memory without"
    else:
        why += ": a larger one ran out of memory"
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
