"""How much work a job is, how much of it is done, and what the next plan has to know of it."""

from coordinator.core.job.state import Job, Round, WorkState
from coordinator.core.plan.decision import NodeResult, PlanRequest
from coordinator.core.round.shards import due_prefetch
from coordinator.core.round.staff import staff
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Samples


def work_samples(spec: JobSpec) -> Samples:
    """The work that a job file states, whoever does how much of it."""
    return spec.stated_samples


def is_done(job: Job) -> bool:
    """Whether no further round is due: planned rounds differ in size, so their samples count."""
    if job.model is None:
        return False
    if job.spec.strategy == "aware":
        return job.tally.samples >= work_samples(job.spec)
    return job.model.round >= job.spec.training.rounds


def plan_request(job: Job) -> PlanRequest:
    """What the plan of the next round may depend on. The same state gives the same request."""
    if job.model is None:
        raise AssertionError("a plan needs a model")
    return PlanRequest(
        round=job.model.round,
        at_ms=job.at_ms,
        spec=job.spec,
        candidates={node: job.members[node].slot for node in staff(job)},
        samples_done=job.tally.samples,
        samples_total=work_samples(job.spec),
        previous=job.plan_memory,
        results=_results(job.closed),
        agreement=job.closed.agreement if job.closed is not None else None,
        prefetched={
            node: prefetch.inner_steps
            for node in staff(job)
            if (prefetch := due_prefetch(job, node))
        },
    )


def _results(round_: Round | None) -> dict[NodeId, NodeResult]:
    if round_ is None:
        return {}
    return {
        node: NodeResult(participant.plan, participant.took_ms, participant.is_out_of_memory)
        for node, participant in round_.participants.items()
        if participant.work is not WorkState.UNREADABLE
    }
