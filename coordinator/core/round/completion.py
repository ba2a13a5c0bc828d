"""Who can work, how much of a job is done, and the facts that the next plan rests on."""

from coordinator.core.job.state import Job, Round, WorkState
from coordinator.core.plan.decision import NodeResult, PlanRequest
from coordinator.core.round.shards import due_prefetch
from hypergpu.ids import NodeId


def available_nodes(job: Job) -> list[NodeId]:
    """Nodes that can take work, in slot order."""
    able = [(member.slot, node) for node, member in job.members.items() if member.can_work]
    return [node for _, node in sorted(able)]


def nodes_needed(job: Job) -> int:
    """Nodes without which no round opens: the stated number for the first, then one."""
    is_first = job.model is None or job.model.round == 0
    return job.spec.training.nodes if is_first else 1


def is_done(job: Job) -> bool:
    """Whether no further round is due: planned rounds differ in size, so their samples count."""
    if job.model is None:
        return False
    if job.spec.strategy == "aware":
        return job.tally.samples >= job.spec.stated_samples
    return job.model.round >= job.spec.training.rounds


def plan_request(job: Job) -> PlanRequest:
    """All that the plan of the next round may depend on. The same state gives the same request."""
    nodes = available_nodes(job)
    due = {node: due_prefetch(job, node) for node in nodes}
    return PlanRequest(
        round=job.newest_model.round,
        at_ms=job.at_ms,
        spec=job.spec,
        candidates={node: job.members[node].slot for node in nodes},
        samples_done=job.tally.samples,
        samples_total=job.spec.stated_samples,
        previous=job.plan_memory,
        results=_results(job.closed),
        agreement=job.closed.agreement if job.closed is not None else None,
        prefetched={node: prefetch.inner_steps for node, prefetch in due.items() if prefetch},
    )


def _results(round_: Round | None) -> dict[NodeId, NodeResult]:
    if round_ is None:
        return {}
    return {
        node: NodeResult(participant.plan, participant.took_ms, participant.is_out_of_memory)
        for node, participant in round_.participants.items()
        if participant.work is not WorkState.UNREADABLE
    }
