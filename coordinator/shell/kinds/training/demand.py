"""Nodes that a training job can use, as the allocation of nodes to jobs asks for them."""

from coordinator.core.training.available import nodes_needed
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.work import node_fit
from coordinator.core.work.demand import JobDemand
from coordinator.core.work.members import staying_members
from coordinator.core.work.node_fit import experts_reason, operator_reason, optimizer_reason
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.workload_versions import catalogue_version, later_versions
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import JobSpec

_USES_NODES = frozenset(
    {Phase.PREPARING, Phase.WAITING, Phase.PLANNING, Phase.TRAINING, Phase.AGGREGATING}
)


def uses_nodes(job: Job) -> bool:
    """Whether the job can use nodes in the phase it is in."""
    return job.phase in _USES_NODES


def job_demand(runtime: JobRuntime) -> JobDemand:
    """The demand of a job that has not ended."""
    job, node_wish = runtime.job, runtime.job.spec.nodes
    # A job that waits for nodes opens no round that would take new settings over.
    newest = (job.next_spec or job.spec).nodes
    version = runtime.workload_version
    if version and job.model is not None:
        version = job.workload_version  # as its tasks say; the catalogue may have a newer one
    return JobDemand(
        job_id=job.job_id,
        nodes_min=nodes_needed(job),
        workload=job.spec.workload,
        workload_version=version,
        later_versions=later_versions(job.spec.workload, version),
        members=staying_members(job),
        nodes_max=node_wish.max,
        requirements=node_wish.requirements,
        data_name=job.spec.data.name,
        operators=runtime.operators,
        optimizer=job.spec.inner.optimizer,
        owner=job.owner,
        priority=newest.priority,
        weight=newest.weight,
    )


def new_job_demand(spec: JobSpec) -> JobDemand:
    """The demand of a job that is not created yet."""
    return JobDemand(
        job_id=JobId(""),
        nodes_min=spec.training.nodes,
        workload=spec.workload,
        workload_version=catalogue_version(spec.workload),
        members=frozenset(),
        requirements=spec.nodes.requirements,
        data_name=spec.data.name,
        optimizer=spec.inner.optimizer,
    )


def unmet_reason(runtime: JobRuntime, stream: ControlStream) -> str:
    """Why a connected node does not meet the job's requirements, or its software or torch do not;
    empty: all do.
    """
    able, spec = stream.capabilities, runtime.job.spec
    return (
        optimizer_reason(spec.inner.optimizer, able.optimizers)
        or experts_reason(is_partial=runtime.is_partial, holds_experts=able.holds_experts)
        or operator_reason(runtime.operators, able.lacking_operators, able.torch)
        or node_fit.unmet_reason(spec.nodes.requirements, stream.features)
    )


def lacks_data(job: Job, connected: ConnectedNodes, node: NodeId) -> str:
    """Why a connected node cannot take part: the job's data set is none of its; empty: it may."""
    name = job.spec.data.name
    if not name or name in connected.streams[node].capabilities.data_names:
        return ""
    detail = f"{job.job_id} trains on {name} where it is, and this node's owner has named no folder"
    return str(HyperGPUError(Reason.OWNER_DATA, detail))
