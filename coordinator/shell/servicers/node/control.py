"""A node's control stream: heartbeats and progress up, work and cancels down."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import structlog

from coordinator.core.job.commands import AssignShard
from coordinator.core.job.events import ShardHandedBack
from coordinator.core.job.state import Job, Phase, WorkState
from coordinator.core.round.assigning import assignment
from coordinator.shell import translate
from coordinator.shell.commands.perform import assign
from coordinator.shell.runtime.connected_nodes import ControlStream
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.access import NodeGate
from coordinator.shell.servicers.wire.handlers import Requests
from coordinator.shell.servicers.wire.versions import (
    reject_other_version,
    version_message,
)
from coordinator.shell.telemetry.probe_tokens import RENEWAL_MS
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.process.clock import monotonic_ms
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.protocol import OUT_OF_MEMORY, SOFTWARE
from hypergpu.wire.statements import receipt_value

log = structlog.get_logger()

_REASON_LENGTH_MAX = 500


async def control(
    services: Services, gate: NodeGate, node: NodeId, requests: Requests
) -> AsyncIterator[node_pb2.ControlResponse]:
    """Serve one control stream until either side ends it."""
    session = await _open_session(services, gate, node, requests)
    listening = asyncio.create_task(_listen(services, session, requests))
    try:
        while (message := await session.outbox.get()) is not None:
            yield message
        if listening.done() and (broken := listening.exception()) is not None:
            raise broken
    finally:
        _end(listening)
        services.nodes.disconnect(session)
        _note_absence(services, node)
        _left_for_good(services, session)
        log.info("a node's control stream ended", node=node)


async def _open_session(
    services: Services, gate: NodeGate, node: NodeId, requests: Requests
) -> ControlStream:
    first = await requests.next(services.settings.read_timeout_ms)
    gate.check(node)  # It may have been revoked before it said hello.
    if first is None or first.WhichOneof("message") != "hello":
        raise HyperGPUError(Reason.REQUEST_INVALID, "a control stream begins with a hello")
    hello = first.hello
    reject_other_version(hello.version)
    capabilities = translate.capabilities_value(hello.capabilities)
    newest = {
        JobId(each.job_id): receipt_value(each.receipt, node) for each in hello.newest_receipts
    }
    session = ControlStream(node, capabilities, hello.version.software[:_REASON_LENGTH_MAX])
    session.send(_welcome(services, node))
    services.nodes.connect(session)
    services.readings.mark_present(node)
    if hello.is_starting:
        services.readings.mark_starting(node)
    log.info("a node is connected", node=node, software=session.software, ours=SOFTWARE)
    _resume(services, session, hello.working)
    if services.job_terms.payments is not None:
        services.job_terms.payments.greet(node, newest)
    services.allocator.review()
    return session


def _welcome(services: Services, node: NodeId) -> node_pb2.ControlResponse:
    """The greeting; said again, it renews the node's probe token."""
    welcome = node_pb2.Welcome(
        version=version_message(),
        heartbeat_interval_ms=services.settings.heartbeat_interval_ms,
        probe_port=services.echo.port,
        probe_token=services.echo.token(node),
    )
    return node_pb2.ControlResponse(welcome=welcome)


def _resume(services: Services, session: ControlStream, working: Sequence[node_pb2.Lease]) -> None:
    """Say again what the node is to do, and end what it no longer should."""
    runtime = services.allocator.runtime_of(session.node)
    if runtime is not None and runtime.is_recovering:
        return  # Its work goes out when the job is checked.
    command = pending_assignment(runtime.job, session.node) if runtime is not None else None
    current = (
        (runtime.job.job_id, command.assignment.lease.number)
        if runtime is not None and command
        else None
    )
    held = {(JobId(lease.job_id), lease.number) for lease in working}
    for lease in working:
        if (lease.job_id, lease.number) != current:
            cancel = node_pb2.Cancel(lease=lease, reason="the lease is no longer current")
            session.send(node_pb2.ControlResponse(cancel=cancel))
    if runtime is not None and command is not None and current not in held:
        assign(services, runtime, command)


def pending_assignment(job: Job, node: NodeId) -> AssignShard | None:
    """What `outstanding` has for one node, without a look at all the others."""
    participant = job.round.participants.get(node) if job.round else None
    if participant is None or participant.work is not WorkState.PENDING:
        return None
    if job.phase is not Phase.TRAINING or job.lost_model:
        return None
    return assignment(job, node)


async def _listen(services: Services, session: ControlStream, requests: Requests) -> None:
    """Take in what the node says; ends the session when it says no more."""
    renewal_ms = monotonic_ms() + RENEWAL_MS
    try:
        while (message := await requests.next(services.settings.lost_after_ms)) is not None:
            services.nodes.mark_heard(session.node)
            if monotonic_ms() >= renewal_ms:
                renewal_ms = monotonic_ms() + RENEWAL_MS
                session.send(_welcome(services, session.node))
            if not _hear_of_line(services, session, message):
                await _hear_of_work(services, session.node, message)
    finally:
        session.close()


def _hear_of_line(
    services: Services, session: ControlStream, message: node_pb2.ControlRequest
) -> bool:
    """Take in what only says how the node is, at once; False for everything else."""
    match message.WhichOneof("message"):
        case "heartbeat":
            echo = node_pb2.HeartbeatEcho(sequence=message.heartbeat.sequence)
            session.send(node_pb2.ControlResponse(heartbeat_echo=echo))
        case "round_trip_probe":
            back = node_pb2.RoundTripEcho(sequence=message.round_trip_probe.sequence)
            session.send(node_pb2.ControlResponse(round_trip_echo=back))
        case "measured":
            services.readings.record_report(session.node, message.measured)
        case "worker_ready":
            services.readings.mark_present(session.node)
        case _:
            return False
    return True


async def _hear_of_work(services: Services, node: NodeId, message: node_pb2.ControlRequest) -> None:
    match message.WhichOneof("message"):
        case "progress":
            _note_progress(services, node, message.progress)
        case "hand_back":
            await _hand_back(services, node, message.hand_back)
        case "draining":
            reason = message.draining.reason[:_REASON_LENGTH_MAX]
            await services.allocator.drain(node, reason or "the node is draining")
        case _:
            raise HyperGPUError(Reason.REQUEST_INVALID, "an empty control message")


def _note_progress(services: Services, node: NodeId, progress: node_pb2.Progress) -> None:
    services.nodes.record_progress(node, translate.progress_value(progress))
    runtime = services.driver.runtimes.get(JobId(progress.lease.job_id))
    if runtime is not None:
        runtime.progress_version += 1


async def _hand_back(services: Services, node: NodeId, message: node_pb2.HandBack) -> None:
    reason = message.reason[:_REASON_LENGTH_MAX] or "handed back"
    event = ShardHandedBack(
        at_ms=Milliseconds(0),
        node=node,
        round=message.lease.round,
        lease=message.lease.number,
        reason=reason,
        is_out_of_memory=reason.startswith(OUT_OF_MEMORY),
    )
    refused = await services.driver.insist(JobId(message.lease.job_id), event)
    if refused:
        # A node may say this as often as it likes.
        log.debug("no shard was handed back", node=node, reason=reason, refused=refused)
        return
    log.info("a shard was handed back", node=node, reason=reason)
    services.allocator.review()


def _end(listening: "asyncio.Task[None]") -> None:
    """Stop listening; an error that ended it before was raised already or died with the stream."""
    listening.cancel()
    if listening.done() and not listening.cancelled():
        listening.exception()


def _note_absence(services: Services, node: NodeId) -> None:
    if node not in services.nodes.streams:
        services.readings.mark_absent(node)
        services.echo.forget(node)


def _left_for_good(services: Services, session: ControlStream) -> None:
    """A draining node that holds no work and closes its stream is not waited for."""
    node = session.node
    is_replaced = node in services.nodes.streams
    if is_replaced or not services.nodes.drain_reason(node):
        return
    if services.allocator.runtime_of(node) is None:
        services.nodes.forget(node)
