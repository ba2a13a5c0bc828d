"""The export of a job's models."""

import asyncio

from coordinator.core.training.job.state import Job, Model
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.service.card import model_card
from coordinator.shell.store.blobs.manifests import stored_manifest
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_from_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import job_pb2
from hypergpu.wire.messages import blob_message
from hypergpu.workloads.registry import UnknownWorkloadError, find


async def resolve_model(
    storage: Storage, runtime: JobRuntime, request: job_pb2.ResolveModelRequest
) -> job_pb2.ResolveModelResponse:
    """A ticket for a job's model, with what turns it into named tensors."""
    model = _choose_model(runtime.job, request.which or "latest")
    if runtime.layout is None:
        raise HyperGPUError(Reason.NOT_READY, "the job is being taken up again")
    blob = await asyncio.to_thread(storage.blobs.find, model.blob.digest)
    files = await asyncio.to_thread(_files_beside, storage.blobs, runtime.job)
    for each in (blob, *files.values()):
        if request.is_doubted:
            await storage.bulk.doubt(each.digest)
    return job_pb2.ResolveModelResponse(
        blob=blob_message(blob),
        layout_json=runtime.layout.to_json().decode(),
        model_card=model_card(runtime.job, model, runtime.layout),
        ticket=await storage.bulk.ticket(None, blob),
        files=[
            job_pb2.ModelFile(
                path=path, blob=blob_message(each), ticket=await storage.bulk.ticket(None, each)
            )
            for path, each in files.items()
        ],
    )


def _files_beside(blobs: BlobStore, job: Job) -> dict[str, BlobRef]:
    """Files of the job's data that an export carries, by path. Blocks.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, one is missing or damaged.
    """
    try:
        paths = find(job.spec.workload).exported_files
    except UnknownWorkloadError:
        return {}
    if not paths or job.manifest is None:
        return {}
    entries = {each.path: each.blob for each in stored_manifest(blobs, job.manifest).entries}
    digests = {path: entries[path].digest.value for path in paths if path in entries}
    return {path: blobs.find(digest_from_wire(each)) for path, each in digests.items()}


def _choose_model(job: Job, which: str) -> Model:
    if which not in {"latest", "best"}:
        detail = f"which is 'latest' or 'best', not {which[:40]!r}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    model = job.model if which == "latest" else job.best_model
    if model is None:
        why = "no model yet" if which == "latest" else "no evaluated model yet"
        raise HyperGPUError(Reason.MODEL_MISSING, f"{job.job_id} has {why}")
    return model
