"""Nodes that a farm job can use, as the allocation of nodes to jobs asks for them."""

from coordinator.core.farm.state import FarmJob, FarmPhase
from coordinator.core.work import node_fit
from coordinator.core.work.demand import JobDemand, share_reason
from coordinator.core.work.members import staying_members
from coordinator.shell.kinds.farm.runtime import FarmRuntime
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.jobfile.requirements import Requirement, parse_requirement


def uses_nodes(job: FarmJob) -> bool:
    """Whether the job can use nodes in the phase it is in."""
    return job.phase is FarmPhase.WORKING


def farm_demand(runtime: FarmRuntime) -> JobDemand:
    """The demand of a job that has not ended."""
    job, request = runtime.job, runtime.job.request
    return JobDemand(
        job_id=job.job_id,
        nodes_min=1,
        workload=request.work_kind,
        workload_version=request.item_kind_version,
        members=staying_members(job),
        nodes_max=request.nodes_max,
        requirements=_requirements(job),
        owner=job.owner,
        priority=request.priority,
        weight=request.weight,
        needs_signatures=bool(request.unit_price),
        share_permille=request.share_permille,
    )


def unmet_reason(runtime: FarmRuntime, stream: ControlStream) -> str:
    """Why a connected node does not meet the job's requirements; empty: it does."""
    needed_permille = runtime.job.request.share_permille
    return share_reason(
        needed_permille, stream.capabilities.share_permille
    ) or node_fit.unmet_reason(_requirements(runtime.job), stream.features)


def _requirements(job: FarmJob) -> tuple[Requirement, ...]:
    return tuple(map(parse_requirement, job.request.requirements))
