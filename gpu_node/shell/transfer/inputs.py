"""What a shard is trained on: its model (cached, computed, by deltas or whole) and its dataset.

A model is used only if its digest is the job's; each file of a dataset is checked by its own.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path, PurePosixPath

import grpc
import structlog
from google.protobuf.message import DecodeError

from gpu_node.shell.link.channel import describe_error, rejection_in
from gpu_node.shell.link.coroutines import gather_or_cancel
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import BlobSource, Download
from gpu_node.shell.worker_host.staging import Stage, take_file
from gpu_node.shell.worker_host.supervision import WorkerSupervisor
from hypergpu.assignment import Assignment, Delta
from hypergpu.blobs import BlobRef
from hypergpu.data_paths import checked_paths
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.tensors.codec import ApplyError, apply_delta
from hypergpu.tensors.layout import JSON_BYTES_MAX, Layout, LayoutError, layout_from_json
from hypergpu.units import Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.messages import blob_value

log = structlog.get_logger()


class InitialModels:
    """Computes first models. One that came out as another model is not tried again."""

    def __init__(
        self, cache: BlobCache, worker: WorkerSupervisor, stage: Stage, limit_ms: Milliseconds
    ) -> None:
        self._cache = cache
        self._worker = worker
        self._stage = stage
        self._limit_s = limit_ms / 1000
        self._attempts = count()
        self._unreachable: set[Digest] = set()

    async def compute(self, assignment: Assignment, dataset: Path | None = None) -> Path | None:
        """The job's first model in the cache; None where it has to be fetched.

        Args:
            assignment: Work of the job.
            dataset: The job's data, on which its model may depend; None: it has none.
        """
        initial = assignment.initial
        if initial is None or initial.digest in self._unreachable:
            return None
        suffix = f".computed{next(self._attempts)}"
        model_path = self._cache.path(initial.digest).with_suffix(suffix)
        try:
            await self._write(assignment, initial.seed, dataset)
            await asyncio.to_thread(take_file, self._stage.first_model, model_path)
            digest = await asyncio.to_thread(digest_of_file, model_path)
            if digest != initial.digest:
                detail = f"{digest[:12]} was computed here, {initial.digest[:12]} is the job's"
                raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
        except (HyperGPUError, OSError) as unusable:
            self._unreachable.add(initial.digest)
            reason = describe_error(unusable)
            log.warning("the first model is fetched, not computed", reason=reason)
            return None
        else:
            log.info("the first model was computed here", digest=initial.digest)
            return self._cache.admit(model_path, initial.digest)
        finally:
            model_path.unlink(missing_ok=True)

    async def _write(self, assignment: Assignment, seed: int, dataset: Path | None) -> None:
        job_id = assignment.lease.job_id
        await self._worker.begin_job(job_id)
        await asyncio.to_thread(self._stage.open_job, job_id)
        path = self._stage.first_model
        staged_dataset = await asyncio.to_thread(self._stage.dataset, dataset)
        try:
            async with asyncio.timeout(self._limit_s):
                await self._worker.write_initial_model(assignment.task, seed, path, staged_dataset)
        except TimeoutError:
            detail = f"the worker computed no model within {self._limit_s:g} s"
            self._worker.end_worker(detail)
            raise HyperGPUError(Reason.WORKER_UNUSABLE, detail) from None


class Models:
    """Gets models. Raises the errors of `Download.fetch`.

    Args:
        cache: Holds the models.
        download: Fetches models and deltas.
        initial_models: Computes first models; None: they are fetched like others.
    """

    def __init__(
        self,
        cache: BlobCache,
        download: Download,
        initial_models: InitialModels | None = None,
    ) -> None:
        self._cache = cache
        self._download = download
        self._initial_models = initial_models
        self._layouts: dict[Digest, Layout] = {}
        self._attempts = count()

    async def get(
        self, source: BlobSource, assignment: Assignment, dataset: Path | None = None
    ) -> Path:
        """The assigned model's file, whole and checked; the job's data are here already."""
        model = assignment.task.model
        path = await self._local_model(model, assignment, dataset)
        if path is None and assignment.deltas:
            path = await self._advance_model(source, assignment, dataset)
        if path is None:
            path = await self._download.fetch(source, model)
        self._cache.use_model(assignment.lease.job_id, model.digest)
        return path

    async def _advance_model(
        self, source: BlobSource, assignment: Assignment, dataset: Path | None
    ) -> Path | None:
        """The model made of the newest one here; None when the whole model has to be fetched."""
        model = assignment.task.model
        base, missing_deltas = await self._newest_base(assignment, dataset)
        if (
            base is None
            or sum(delta.blob.size_bytes for delta in missing_deltas) >= model.size_bytes
        ):
            return None
        try:
            layout = await self._layout(source, assignment.task.layout)
            return await self._advance(source, base, missing_deltas, model=model, layout=layout)
        except grpc.aio.AioRpcError as error:
            if rejection_in(error) is None:
                raise
            reason = describe_error(error)
        except (HyperGPUError, ApplyError, LayoutError, ValueError) as unusable:
            reason = describe_error(unusable)
        finally:
            self._cache.discard(delta.blob.digest for delta in missing_deltas)
        log.warning("the deltas are of no use: fetching the whole model", reason=reason)
        return None

    async def _newest_base(
        self, assignment: Assignment, dataset: Path | None
    ) -> tuple[Path | None, tuple[Delta, ...]]:
        """The newest model here that deltas lead on from, and those deltas."""
        deltas = assignment.deltas
        for place in reversed(range(len(deltas))):
            base = BlobRef(deltas[place].base, assignment.task.model.size_bytes)
            if (path := await self._local_model(base, assignment, dataset)) is not None:
                return path, deltas[place:]
        return None, ()

    async def _local_model(
        self, model: BlobRef, assignment: Assignment, dataset: Path | None
    ) -> Path | None:
        """A model that needs no fetching: cached, or computed if it is the job's first."""
        path, initial = await self._cache.find(model), assignment.initial
        is_first = initial is not None and model.digest == initial.digest
        if path is not None or not is_first or self._initial_models is None:
            return path
        path = await self._initial_models.compute(assignment, dataset)
        if path is not None:
            self._cache.use_model(assignment.lease.job_id, model.digest)
        return path

    async def _advance(
        self,
        source: BlobSource,
        base: Path,
        deltas: tuple[Delta, ...],
        *,
        model: BlobRef,
        layout: Layout,
    ) -> Path:
        """Apply deltas one after the other. Models in between are deleted."""
        ends = (*(delta.base for delta in deltas[1:]), model.digest)
        model_path = base
        for delta, end in zip(deltas, ends, strict=True):
            difference = await self._download.fetch(source, delta.blob)
            before = model_path
            try:
                model_path = await self._apply_delta(
                    end, before, difference, delta=delta, layout=layout
                )
            finally:
                if before != base:
                    before.unlink()
        return self._cache.admit(model_path, model.digest)

    async def _apply_delta(
        self, digest: Digest, base: Path, difference: Path, *, delta: Delta, layout: Layout
    ) -> Path:
        # The thread of a cancelled attempt may still write: each attempt has its own file.
        model_path = self._cache.path(digest).with_suffix(f".{next(self._attempts)}")
        result_digest = await asyncio.to_thread(
            apply_delta, base, difference, model_path, layout=layout, codec=delta.codec
        )
        if result_digest != digest:
            model_path.unlink()
            raise HyperGPUError(Reason.DIGEST_MISMATCH, f"base and delta do not give {digest}")
        return model_path

    async def _layout(self, source: BlobSource, digest: Digest) -> Layout:
        """The layout, a blob as well: the daemon cannot build it, since that may need torch."""
        layout = self._layouts.get(digest)
        if layout is None:
            text = await self._download.fetch_small(source, digest, JSON_BYTES_MAX)
            layout = self._layouts[digest] = layout_from_json(text)
        return layout


_AT_ONCE = 8
"""Small files cost a round trip each."""


async def fetch_blobs(
    download: Download, source: BlobSource, blobs: Sequence[BlobRef]
) -> tuple[Path, ...]:
    """Blobs of packed work in the cache. Raises the errors of `Download.fetch`."""
    files: list[Path] = []
    remaining_blobs = iter(blobs)
    while batch := list(islice(remaining_blobs, _AT_ONCE)):
        files += await gather_or_cancel([download.fetch(source, blob) for blob in batch])
    return tuple(files)


def manifest_entries(content: bytes) -> dict[PurePosixPath, BlobRef]:
    """Read a manifest, trusting nothing in it.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is malformed or a path leads elsewhere; REQUEST_INVALID,
            a digest is malformed.
    """
    try:
        manifest = tensor_pb2.Manifest.FromString(content)
    except DecodeError:
        raise HyperGPUError(Reason.MANIFEST_INVALID, "the bytes are no manifest") from None
    paths = checked_paths(entry.path for entry in manifest.entries)
    blobs = (blob_value(entry.blob) for entry in manifest.entries)
    return dict(zip(paths, blobs, strict=True))


class Datasets:
    """Fetches datasets. Raises the errors of `Download.fetch` and `manifest_entries`."""

    def __init__(self, cache: BlobCache, download: Download) -> None:
        self._cache = cache
        self._download = download
        self._layout_lock = threading.Lock()

    async def fetch(self, source: BlobSource, manifest: BlobRef) -> Path:
        """The folder that holds exactly the manifest's files."""
        folder = self._cache.dataset(manifest.digest)
        if self._cache.is_verified_dataset(manifest.digest) and folder.exists():
            os.utime(folder)
            return folder
        manifest_bytes = await self._download.fetch(source, manifest)
        entries = await asyncio.to_thread(lambda: manifest_entries(manifest_bytes.read_bytes()))
        self._cache.check_room(
            sum({blob.digest: blob.size_bytes for blob in entries.values()}.values())
        )
        if not await asyncio.to_thread(_is_whole, folder, entries):
            await self._fetch_files(source, folder, entries)
        self._cache.admit_dataset(manifest.digest)
        files = {blob.digest: folder / path for path, blob in entries.items()}
        self._cache.note_dataset(files)
        return folder

    async def _fetch_files(
        self, source: BlobSource, folder: Path, entries: dict[PurePosixPath, BlobRef]
    ) -> None:
        files = await fetch_blobs(self._download, source, tuple(entries.values()))
        sources = dict(zip(entries, files, strict=True))
        await asyncio.to_thread(self._lay_out, folder, sources)
        await asyncio.to_thread(self._cache.discard, [blob.digest for blob in entries.values()])

    def _lay_out(self, folder: Path, sources: Mapping[PurePosixPath, Path]) -> None:
        """Make the folder out of cached files. Blocks, as there may be a great many."""
        partial_folder = folder.with_suffix(".making")
        # Nobody waits for the thread of a stopped task; the next task's thread waits here for it.
        with self._layout_lock:
            shutil.rmtree(partial_folder, ignore_errors=True)
            partial_folder.mkdir()
            for path, file in sources.items():
                target = partial_folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)
            shutil.rmtree(folder, ignore_errors=True)
            partial_folder.replace(folder)


def _is_whole(folder: Path, entries: dict[PurePosixPath, BlobRef]) -> bool:
    try:
        return all(
            (folder / path).stat().st_size == blob.size_bytes
            and digest_of_file(folder / path) == blob.digest
            for path, blob in entries.items()
        )
    except OSError:
        return False
