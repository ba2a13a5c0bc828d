"""Results of packed work: each is read by its kind, and accepted once."""

import structlog

from coordinator.shell.driver.driver import Driver
from coordinator.shell.failpoints import failpoint
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import lease_value
from hypergpu.wire.work import work_value

log = structlog.get_logger()


async def contribute(
    driver: Driver, nodes: ConnectedNodes, node: NodeId, request: node_pb2.ContributeRequest
) -> node_pb2.ContributeResponse:
    """Have a result accepted; it is durable when this returns.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is malformed, or not what the lease's work gives;
            JOB_UNKNOWN; LEASE_STALE, the lease is void.
    """
    lease, result = lease_value(request.lease), work_value(request.result)
    runtime = driver.runtimes.get(lease.job_id)
    if runtime is None:
        raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {lease.job_id[:80]!r}")
    machine = driver.kinds.of_job(runtime.job).core
    if machine.packed is None:
        detail = f"{lease.job_id} takes no packed work: it is a job of kind {machine.name}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    event = machine.packed.result_event(runtime.job, node, lease, result)
    if event is None:
        return node_pb2.ContributeResponse()
    if why := await driver.submit(lease.job_id, event):
        pending_work = machine.pending(runtime.job, node)
        is_current = pending_work is not None and pending_work.lease == lease.number
        nodes.count(node, rejected=1)
        log.info("a result was rejected", node=node, job_id=lease.job_id, reason=why)
        raise HyperGPUError(Reason.REQUEST_INVALID if is_current else Reason.LEASE_STALE, why)
    failpoint("contribution.accepted")
    nodes.count(node, accepted=1)
    return node_pb2.ContributeResponse()
