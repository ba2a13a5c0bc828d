"""Results of packed work: each is read by its kind, and accepted once.

A blob that a result names is sent before it, by a ticket, or comes beside it where it is small. It
is checked and durable before the result is decided on.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import structlog

from coordinator.core.work.kind import PackedForms
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.driver.performing import Performing
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performers.packed_work import PackedWorkPerformer, result_owner
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.store.blobs.upload_store import upload_name
from coordinator.shell.store.storage import Storage
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.packed_work import CONTENT_BYTES_MOST
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import blob_value, lease_value
from hypergpu.wire.packing import pack_addresses
from hypergpu.wire.work import work_value

log = structlog.get_logger()
_KEEP_S = 0
"""Pins hold what is not journalled yet."""


class _PackedJob(NamedTuple):
    """A job of packed work, and what its kind does with results."""

    runtime: WorkRuntime[Any]
    performer: PackedWorkPerformer
    forms: PackedForms


@dataclass(frozen=True)
class ResultIntake:
    """Takes results of packed work in."""

    performing: Performing
    storage: Storage
    heavy: HeavyWork
    nodes: ConnectedNodes

    async def offer(
        self, node: NodeId, request: node_pb2.OfferResultRequest
    ) -> node_pb2.OfferResultResponse:
        """Give a node a ticket for what is missing of the blob of its result.

        Raises:
            HyperGPUError: JOB_UNKNOWN; LEASE_STALE; REQUEST_INVALID, its work gives no such blob;
                DISK_FULL, it does not fit.
        """
        lease, blob = lease_value(request.lease), blob_value(request.blob)
        runtime, performer, _ = self._packed_job(lease.job_id)
        self._require_open(runtime, node, lease)
        _require_size(performer.result_bytes_most(runtime, node), blob)
        name = _upload_name(node, lease, blob)
        await self.storage.commits.wait(name)
        with runtime.tell_obstacle():
            upload = await asyncio.to_thread(self.storage.uploads.open, name, blob)
            ticket = await self.storage.bulk.upload_ticket(node, upload)
        ticket = pack_addresses(ticket, self.nodes.known_address(node))
        return node_pb2.OfferResultResponse(ticket=ticket)

    async def contribute(
        self, node: NodeId, request: node_pb2.ContributeRequest
    ) -> node_pb2.ContributeResponse:
        """Have a result accepted; it is durable when this returns.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed, or not what the lease's work gives;
                JOB_UNKNOWN; LEASE_STALE, the lease is void; OFFSET_MISMATCH, its blob is not here;
                SIGNATURE_INVALID.
        """
        lease, result = lease_value(request.lease), work_value(request.result)
        runtime, performer, forms = self._packed_job(lease.job_id)
        event = forms.result_event(runtime.job, node, lease, result)
        if event is None:
            return node_pb2.ContributeResponse()
        event = performer.with_claim(runtime, event, request.signature)
        blob = blob_value(request.blob) if request.HasField("blob") else None
        digests = [] if blob is None else [blob.digest]
        self.storage.pins.add(digests)
        try:
            if blob is not None:
                self._require_open(runtime, node, lease)
                _require_size(performer.result_bytes_most(runtime, node), blob)
                if request.content:
                    await self._keep(runtime, blob, request.content)
                else:
                    await self._store(runtime, _upload_name(node, lease, blob), blob)
            await performer.check_result(runtime, event, blob, request.content)
            await self._accept(runtime, node, lease, event)
        finally:
            self.storage.pins.drop(digests)
        return node_pb2.ContributeResponse()

    def _packed_job(self, job_id: JobId) -> _PackedJob:
        runtime = self.performing.driver.runtimes.get(job_id)
        if runtime is None:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
        machine = self.performing.driver.kinds.of_job(runtime.job).core
        performer = self.performing.performer_of(runtime)
        if machine.packed is None or not isinstance(performer, PackedWorkPerformer):
            detail = f"{job_id} takes no packed work: it is a job of kind {machine.name}"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        return _PackedJob(runtime, performer, machine.packed)

    def _require_open(self, runtime: WorkRuntime[Any], node: NodeId, lease: Lease) -> None:
        """Refuse bytes under a lease that is void: nothing of them would be accepted."""
        if not self._is_open(runtime, node, lease):
            detail = f"lease {lease.number} of {lease.job_id} is void"
            raise HyperGPUError(Reason.LEASE_STALE, detail)

    def _is_open(self, runtime: WorkRuntime[Any], node: NodeId, lease: Lease) -> bool:
        works = self.performing.driver.kinds.of_job(runtime.job).core.pending(runtime.job, node)
        return any(work.lease == lease.number for work in works)

    async def _store(self, runtime: WorkRuntime[Any], name: str, blob: BlobRef) -> None:
        """Make a checked and durable blob of the upload.

        A blob that is here already is no reason to spare the upload: who only knows the digest of
        another node's result has done nothing.
        """

        async def commit() -> None:
            with runtime.tell_obstacle():
                sealed_path = await self.storage.bulk.receive_upload(name, blob)
            finish = self.storage.uploads.finish
            await self.heavy.run(partial(finish, sealed_path, blob, keep_s=_KEEP_S))
            failpoint("result.stored")

        await self.storage.commits.run(name, commit)

    async def _keep(self, runtime: WorkRuntime[Any], blob: BlobRef, content: bytes) -> None:
        """Make a durable blob of bytes that came beside the result.

        Raises:
            HyperGPUError: REQUEST_INVALID, they are too many, or not the blob that it names.
        """
        if len(content) > CONTENT_BYTES_MOST or len(content) != blob.size_bytes:
            detail = f"{len(content)} bytes came beside a result whose blob has {blob.size_bytes}"
            fix = f"send {CONTENT_BYTES_MOST} bytes at most, and the whole blob"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
        if digest_of(content) != blob.digest:
            detail = "the bytes beside the result are not the blob that it names"
            raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
        with runtime.tell_obstacle():
            put = partial(self.storage.blobs.put, content, keep_s=_KEEP_S)
            await asyncio.to_thread(put)
        failpoint("result.stored")

    async def _accept(
        self, runtime: WorkRuntime[Any], node: NodeId, lease: Lease, event: StampedEvent
    ) -> None:
        driver = self.performing.driver
        if why := await driver.submit(lease.job_id, event):
            is_current = self._is_open(runtime, node, lease)
            self.nodes.count(node, rejected=1)
            log.info("a result was rejected", node=node, job_id=lease.job_id, reason=why)
            raise HyperGPUError(Reason.REQUEST_INVALID if is_current else Reason.LEASE_STALE, why)
        failpoint("contribution.accepted")
        self.nodes.count(node, accepted=1)


def _require_size(most_bytes: Bytes, blob: BlobRef) -> None:
    if blob.size_bytes > most_bytes:
        detail = f"the blob of the result has {blob.size_bytes} bytes, and {most_bytes} at most"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="send what the work gives")


def _upload_name(node: NodeId, lease: Lease, blob: BlobRef) -> str:
    key = f"result/{lease.job_id}/{node}/{lease.number}/{blob.digest}/{blob.size_bytes}"
    return upload_name(key, owner=result_owner(lease.job_id, node))
