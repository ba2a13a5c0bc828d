"""An update taken in and measured on its way: how fast it came, and what the work had taken."""

from typing import Any

from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.node import admission
from coordinator.shell.servicers.wire.chunks import Piece
from coordinator.shell.servicers.wire.handlers import Requests
from coordinator.shell.telemetry.readings import FinishedUpdate
from coordinator.shell.telemetry.upload_meter import AddBytes
from hypergpu.digest import digest_from_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2

_WRONG_CONTENT = frozenset(
    {Reason.UPDATE_MALFORMED, Reason.UPDATE_NOT_FINITE, Reason.DIGEST_MISMATCH}
)


class MeteredRequests(Requests):
    """A stream whose header is remembered and whose bytes are timed."""

    def __init__(self, requests: Requests, add_bytes: AddBytes) -> None:
        self._requests = requests
        self._add_bytes = add_bytes
        self.header: node_pb2.UpdateHeader | None = None

    async def next(self, timeout_ms: int) -> Any | None:
        """The next message, timed."""
        message = await self._requests.next(timeout_ms)
        if isinstance(message, Piece):
            self._add_bytes(message.payload.nbytes)
        elif isinstance(message, node_pb2.UpdateHeader) and self.header is None:
            self.header = message
        return message

    async def admit(self) -> None:
        """Let the client go on."""
        await self._requests.admit()

    async def drain(self, timeout_ms: int) -> None:
        """Read on for the sake of the refusal that follows."""
        await self._requests.drain(timeout_ms)


async def submit_measured(
    services: Services, node: NodeId, requests: Requests
) -> node_pb2.SubmitUpdateResponse:
    """Take in one update, or a part of one. Raises what `admission.submit_update` raises."""
    meter = services.readings.upload_meter(node)
    with meter.stream() as add_bytes:
        metered = MeteredRequests(requests, add_bytes)
        try:
            answer = await admission.submit_update(services, node, metered)
        except HyperGPUError as refused:
            if refused.reason in _WRONG_CONTENT:
                services.readings.record_rejected(node)
            raise
    if metered.header is not None:
        _note_done(services, node, metered.header)
    return answer


def _note_done(services: Services, node: NodeId, header: node_pb2.UpdateHeader) -> None:
    job_id, lease = JobId(header.lease.job_id), header.lease.number
    runtime = services.driver.runtimes.get(job_id)
    if runtime is None or runtime.job.round is None:
        return
    participant = runtime.job.round.participants.get(node)
    digest = digest_from_wire(header.digest.value)
    if participant is None or not admission.is_accepted(runtime.job, node, lease, digest):
        return
    stated = runtime.job.round.spec.training.batch_size
    done = FinishedUpdate(
        job_id=job_id,
        lease=lease,
        inner_steps=header.report.inner_steps * participant.plan.batch(stated) / stated,
        compute_ms=Milliseconds(header.report.compute_ms),
        forecast_ms=participant.plan.forecast_ms,
        took_ms=participant.took_ms,
    )
    services.readings.record_accepted(node, done)
