"""Tickets for blobs to fetch, and for users' files to send, which are checked once they came."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from coordinator.core.training.job.state import Job, Model
from coordinator.shell.driver.performing import Performing
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.kinds.performers.packed_work import PackedWorkPerformer
from coordinator.shell.kinds.training.job_runtime import JobRuntime, training_of
from coordinator.shell.kinds.training.lost_model import report_lost_model
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.service.calls import Caller
from coordinator.shell.service.own_files import OwnFiles
from coordinator.shell.store.blobs.upload_store import upload_name
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.tensors.layout import Layout
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.messages import digest_value
from hypergpu.wire.packing import pack_addresses

_KEEP_DATA_S = 24 * 3600
"""A user's file waits this long for the job that names it."""


@dataclass(frozen=True)
class UserFiles:
    """Takes users' files in."""

    storage: Storage
    heavy: HeavyWork
    own: OwnFiles

    async def offer_data(self, caller: Caller, blob: BlobRef) -> job_pb2.OfferDataResponse:
        """Give a user a ticket for what is missing of a file; one that only others sent is missing.

        Raises:
            HyperGPUError: DISK_FULL, it does not fit.
        """
        name = _data_name(caller, blob)
        await self.storage.commits.wait(name)
        if await self._is_there(caller, blob):
            return job_pb2.OfferDataResponse(is_stored=True)
        upload = await asyncio.to_thread(self.storage.uploads.open, name, blob)
        if await self._is_there(caller, blob):
            # Another call was quicker.
            await asyncio.to_thread(self.storage.uploads.discard, name)
            return job_pb2.OfferDataResponse(is_stored=True)
        return job_pb2.OfferDataResponse(ticket=await self.storage.bulk.upload_ticket(None, upload))

    async def commit_data(self, caller: Caller, blob: BlobRef) -> job_pb2.CommitDataResponse:
        """Check a user's file and keep it for the job that names it.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, bytes are missing; DIGEST_MISMATCH; DISK_FULL.
        """
        name = _data_name(caller, blob)

        async def commit() -> None:
            sealed_path = await self.storage.bulk.receive_upload(name, blob)
            finish = self.storage.uploads.finish
            await self.heavy.run(partial(finish, sealed_path, blob, keep_s=_KEEP_DATA_S))
            self.own.note(caller, blob.digest)

        if not await self._is_there(caller, blob):
            await self.storage.commits.run(name, commit)
        return job_pb2.CommitDataResponse()

    async def _is_there(self, caller: Caller, blob: BlobRef) -> bool:
        """Whether a file is here and the caller has shown to have it."""
        if blob.size_bytes and self.own.foreign(caller, {blob.digest}):
            return False
        return await asyncio.to_thread(self._is_stored, blob)

    def _is_stored(self, blob: BlobRef) -> bool:
        """Whether a user's file is here. An empty file needs no upload: it is made."""
        if blob.size_bytes == 0 and blob.digest == digest_of(b""):
            self.storage.blobs.put(b"", keep_s=_KEEP_DATA_S)
        return self.storage.blobs.size(blob.digest) == blob.size_bytes


def _data_name(caller: Caller, blob: BlobRef) -> str:
    user = caller.token.token_id if caller.token is not None else ""
    return upload_name(f"data/{user}/{blob.digest}/{blob.size_bytes}")


@dataclass(frozen=True)
class NodeBlobs:
    """Gives nodes tickets for the blobs of their work."""

    performing: Performing
    storage: Storage
    fleet: Fleet

    async def resolve_blob(
        self, node: NodeId, request: node_pb2.ResolveBlobRequest
    ) -> node_pb2.ResolveBlobResponse:
        """Give a node a ticket for a blob of the job that it works for.

        Raises:
            HyperGPUError: BLOB_UNKNOWN, it may not see it or it is not there; NOT_READY, it is
                damaged and is being made again, or nobody knows yet what the job consists of, or it
                is on its way to the object store; STORE_UNREACHABLE.
        """
        digest = digest_value(request.digest)
        member_of = self.fleet.allocator.runtime_of(node)
        if member_of is not None and training_of(member_of) is None:
            return await self._resolve_input(node, member_of, request)
        runtime = training_of(member_of)
        layout = runtime.layout_of_digest(digest) if runtime is not None else None
        if runtime is not None and layout is not None:
            await asyncio.to_thread(self._store_layout, layout)
        elif runtime is None or not _may_see(runtime, digest):
            raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{digest} is no part of this node's work")
        try:
            blob = await asyncio.to_thread(self.storage.blobs.find, digest)
        except HyperGPUError as error:
            if error.reason is Reason.BLOB_UNKNOWN and await self._is_remade(runtime, digest):
                detail = "the model was damaged on disk and is being made again"
                raise HyperGPUError(Reason.NOT_READY, detail) from error
            raise
        purpose = runtime.job.job_id if digest in _model_digests(runtime.job) else ""
        with runtime.tell_obstacle():
            if request.is_doubted:
                await self.storage.bulk.doubt(digest)
            ticket = await self.storage.bulk.ticket(node, blob, purpose)
        ticket = pack_addresses(ticket, self.fleet.nodes.known_address(node))
        return node_pb2.ResolveBlobResponse(size_bytes=blob.size_bytes, ticket=ticket)

    async def _resolve_input(
        self, node: NodeId, runtime: WorkRuntime[Any], request: node_pb2.ResolveBlobRequest
    ) -> node_pb2.ResolveBlobResponse:
        """Give a node a ticket for a blob that its packed work needs."""
        digest = digest_value(request.digest)
        performer = self.performing.performer_of(runtime)
        if not isinstance(performer, PackedWorkPerformer) or digest not in performer.inputs(
            runtime, node
        ):
            raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{digest} is no part of this node's work")
        blob = await asyncio.to_thread(self.storage.blobs.find, digest)
        with runtime.tell_obstacle():
            if request.is_doubted:
                await self.storage.bulk.doubt(digest)
            ticket = await self.storage.bulk.ticket(node, blob)
        ticket = pack_addresses(ticket, self.fleet.nodes.known_address(node))
        return node_pb2.ResolveBlobResponse(size_bytes=blob.size_bytes, ticket=ticket)

    def _store_layout(self, layout: Layout) -> None:
        """Make the job's layout a blob: a node's daemon applies deltas by it, and cannot build
        it.
        """
        if self.storage.blobs.size(layout.digest) is None:
            self.storage.blobs.put(layout.to_json())

    async def _is_remade(self, runtime: JobRuntime, digest: Digest) -> bool:
        """Whether a missing blob belongs to the current model; then the machine learns of its
        loss.
        """
        model = runtime.job.model
        if model is None or digest not in {blob.digest for blob in model.newest_blobs}:
            return False
        await report_lost_model(
            self.performing.driver, runtime.job.job_id, model.blob.digest, f"{digest} is damaged"
        )
        return True


def _may_see(runtime: JobRuntime, digest: Digest) -> bool:
    """Whether a blob is part of the job.

    Raises:
        HyperGPUError: NOT_READY, that is not known yet.
    """
    if digest in _model_digests(runtime.job) or digest in _data_digests(runtime):
        return True
    if runtime.is_recovering:
        raise HyperGPUError(Reason.NOT_READY, f"{runtime.job.job_id} is being taken up again")
    return False


def _digests(model: Model) -> tuple[Digest, ...]:
    own = (model.blob.digest, *(delta.blob.digest for delta in model.deltas))
    parts = model.held_parts
    deltas = (delta.blob.digest for part in parts for delta in part.deltas)
    return (*own, *(part.blob.digest for part in parts), *deltas)


def _model_digests(job: Job) -> frozenset[Digest]:
    models = [model for model in (job.model, job.previous) if model is not None]
    return frozenset(digest for model in models for digest in _digests(model))


def _data_digests(runtime: JobRuntime) -> frozenset[Digest]:
    manifest = runtime.job.manifest
    entries = runtime.entries_of_manifest or frozenset()
    return entries | ({manifest.digest} if manifest else frozenset())
