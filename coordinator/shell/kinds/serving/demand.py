"""Nodes that a served model can use, as the allocation of nodes to jobs asks for them."""

from coordinator.core.serving.stage_honesty import nodes_of_ring
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work import node_fit
from coordinator.core.work.demand import JobDemand
from coordinator.core.work.members import staying_members
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.jobfile.requirements import Requirement, parse_requirement
from hypergpu.serving.serve_request import engine_version


def uses_nodes(job: ServeJob) -> bool:
    """Whether the job can use nodes in the phase it is in."""
    return job.phase is ServePhase.SERVING and not job.is_unloaded


def serve_demand(runtime: ServeRuntime) -> JobDemand:
    """The demand of a job that has not ended."""
    job, request = runtime.job, runtime.job.request
    return JobDemand(
        job_id=job.job_id,
        # A ring begins once all its stages can be there.
        nodes_min=1 if job.leases else request.nodes if request.cut is not None else 1,
        workload=request.engine,
        workload_version=engine_version(request.engine),
        members=staying_members(job),
        nodes_max=request.nodes if request.cut is None else nodes_of_ring(job, request.cut),
        requirements=_requirements(job),
        excluded={
            node: member.exclusion
            for node, member in job.members.items()
            if member.exclusion and member.is_present
        },
        owner=job.owner,
        trust_labels=frozenset(request.trusted),
        priority=request.priority,
        weight=request.weight,
        needs_count_signatures=bool(request.unit_price),
    )


def unmet_reason(runtime: ServeRuntime, stream: ControlStream) -> str:
    """Why a connected node does not meet the job's requirements; empty: it does."""
    return node_fit.unmet_reason(_requirements(runtime.job), stream.features)


def _requirements(job: ServeJob) -> tuple[Requirement, ...]:
    return tuple(map(parse_requirement, job.request.requirements))
