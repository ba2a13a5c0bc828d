"""How a node gets its assignment, and what it lacks of the model: beside it, or by a ticket."""

import structlog

from coordinator.core.network.inline import InlineRequest, inline_choice
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.store.storage import Storage
from hypergpu.assignment import Assignment
from hypergpu.blobs import BlobRef
from hypergpu.clock import monotonic_ms
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.ids import Digest
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import assignment_message

log = structlog.get_logger()

_CONTENTS_KEPT = 16
"""Newest blobs of jobs: 4 MiB."""


class ModelDelivery:
    """Sends assignments. Those of one round share the bytes of their model's newest blob."""

    def __init__(self, storage: Storage, fleet: Fleet) -> None:
        """Send to nodes of the fleet what the storage holds."""
        self._storage = storage
        self._fleet = fleet
        self._contents: dict[Digest, bytes] = {}
        """Bytes of blobs that were sent, the newest last."""

    def send(self, runtime: JobRuntime, stream: ControlStream, assignment: Assignment) -> None:
        """Send a node its assignment."""
        message = assignment_message(assignment)
        response = node_pb2.ControlResponse(assignment=message)
        if content := self._inline_content(stream, assignment):
            stream.send(response, content)
            runtime.bytes_down = Bytes(runtime.bytes_down + len(content))
            return
        job_id, blob = runtime.job.job_id, assignment.newest_blob
        ticket = self._storage.bulk.ready_ticket(stream.node, blob, job_id)
        if ticket is not None:
            response.assignment.model_ticket.CopyFrom(ticket)
        stream.send(response)

    def _inline_content(self, stream: ControlStream, assignment: Assignment) -> bytes:
        """Bytes to send with an assignment; empty: none."""
        blob, initial = assignment.newest_blob, assignment.initial
        is_drawn = initial is not None and initial.digest == blob.digest
        if not stream.takes_blobs or is_drawn:
            return b""
        now_ms = monotonic_ms()
        request = InlineRequest(
            size_bytes=blob.size_bytes,
            connections=assignment.connections,
            now_ms=now_ms,
            fetched_ms=stream.fetched_ms,
            is_waiting=stream.unwritten_bytes > 0 or stream.is_crowded,
            queued_bytes=Bytes(stream.room.used_bytes),
        )
        is_inline, reason = inline_choice(self._fleet.readings.reading(stream.node), request)
        content = self._content(blob) if is_inline else b""
        log.debug("a model's newest blob", node=stream.node, inline=bool(content), reason=reason)
        if not content and blob.size_bytes >= SMALLEST_BYTES:
            stream.fetched_ms = now_ms
        return content

    def _content(self, blob: BlobRef) -> bytes:
        """The bytes of a small blob, the same object each time; empty: it is not here, or empty."""
        content = self._contents.pop(blob.digest, None)
        if content is None:
            content = self._storage.blobs.small_content(blob) or b""
        self._contents[blob.digest] = content
        if len(self._contents) > _CONTENTS_KEPT:
            del self._contents[next(iter(self._contents))]
        return content
