"""Secret duplicates of a round that is about to open: who gets whose shard, with how much work."""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.training.deal import due_prefetch
from coordinator.core.training.job.state import Job
from coordinator.core.training.plan.common_work import lesser_work
from coordinator.core.training.plan.decision import RoundPlan
from coordinator.core.training.trust.duplicates import RoundWorker, draw_duplicates
from hypergpu.ids import NodeId


def drawn_duplicates(job: Job, plan: RoundPlan) -> dict[NodeId, NodeId]:
    """Who gets the shard of whom. A job whose weights nothing learns compares no updates either."""
    trust = job.spec.trust
    if trust.rule != "robust" or trust.duplicates != "secret" or job.spec.data.stays_on_nodes:
        return {}
    workers = [
        RoundWorker(
            node,
            part,
            has_begun=due_prefetch(job, node) is not None or part.prefetch_steps > 0,
            is_long=part.rounds > 1,
            experts=job.members[node].experts,
        )
        for node, part in plan.nodes.items()
    ]
    stated_batch = job.spec.training.batch_size
    return draw_duplicates(job.draw, job.trust.duplicates, workers, stated_batch)


def repeated_lease(
    plan: RoundPlan, duplicates: Mapping[NodeId, NodeId], node: NodeId
) -> NodeId | None:
    """The node whose shard, under a lease over several rounds, this one gets; None: nobody."""
    other = duplicates.get(node)
    return other if other is not None and plan.nodes[other].rounds > 1 else None


def with_common_work(job: Job, plan: RoundPlan, duplicates: Mapping[NodeId, NodeId]) -> RoundPlan:
    """The plan in which both of a pair have the lesser one's work."""
    stated_batch, nodes = job.spec.training.batch_size, dict(plan.nodes)
    for node, other in (*duplicates.items(), *((it, own) for own, it in duplicates.items())):
        nodes[node] = lesser_work(plan.nodes[node], plan.nodes[other], stated_batch)
    return replace(plan, nodes=nodes)
