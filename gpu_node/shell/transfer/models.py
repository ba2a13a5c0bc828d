"""The model of an assignment: cached, computed if it is the first, by deltas, or fetched whole."""

import asyncio
from itertools import count
from pathlib import Path

import grpc
import structlog

from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.errors import describe_error, rejection_in
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import Download
from gpu_node.shell.transfer.initial_models import InitialModels
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements.assignment import Assignment, BlobRef, Delta
from hypergpu.tensors.codec import ApplyError, apply_delta
from hypergpu.tensors.layout import JSON_BYTES_MAX, Layout, LayoutError, layout_from_json

log = structlog.get_logger()


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

    async def get(self, calls: Calls, assignment: Assignment) -> Path:
        """The assigned model's file, whole and checked."""
        model = assignment.task.model
        path = await self._local_model(model, assignment)
        if path is None and assignment.deltas:
            path = await self._advance_model(calls, assignment)
        if path is None:
            path = await self._download.fetch(calls, model)
        self._cache.use_model(assignment.lease.job_id, model.digest)
        return path

    async def _advance_model(self, calls: Calls, assignment: Assignment) -> Path | None:
        """The model made of the newest one here; None when the whole model has to be fetched."""
        model = assignment.task.model
        base, missing = await self._newest_base(assignment)
        if base is None or sum(delta.blob.size_bytes for delta in missing) >= model.size_bytes:
            return None
        try:
            layout = await self._layout(calls, assignment.task.layout)
            return await self._advance(calls, base, missing, model=model, layout=layout)
        except grpc.aio.AioRpcError as broken:
            if rejection_in(broken) is None:
                raise
            reason = describe_error(broken)
        except (HyperGPUError, ApplyError, LayoutError, ValueError) as unusable:
            reason = describe_error(unusable)
        finally:
            self._cache.discard(delta.blob.digest for delta in missing)
        log.warning("the deltas are of no use: fetching the whole model", reason=reason)
        return None

    async def _newest_base(self, assignment: Assignment) -> tuple[Path | None, tuple[Delta, ...]]:
        """The newest model here that deltas lead on from, and those deltas."""
        deltas = assignment.deltas
        for place in reversed(range(len(deltas))):
            base = BlobRef(deltas[place].base, assignment.task.model.size_bytes)
            if (path := await self._local_model(base, assignment)) is not None:
                return path, deltas[place:]
        return None, ()

    async def _local_model(self, model: BlobRef, assignment: Assignment) -> Path | None:
        """A model that needs no fetching: cached, or computed if it is the job's first."""
        path, initial = await self._cache.find(model), assignment.initial
        is_first = initial is not None and model.digest == initial.digest
        if path is not None or not is_first or self._initial_models is None:
            return path
        path = await self._initial_models.compute(assignment)
        if path is not None:
            self._cache.use_model(assignment.lease.job_id, model.digest)
        return path

    async def _advance(
        self, calls: Calls, base: Path, deltas: tuple[Delta, ...], *, model: BlobRef, layout: Layout
    ) -> Path:
        """Apply deltas one after the other. Models in between are deleted."""
        ends = (*(delta.base for delta in deltas[1:]), model.digest)
        made = base
        for delta, end in zip(deltas, ends, strict=True):
            difference = await self._download.fetch(calls, delta.blob)
            before = made
            try:
                made = await self._apply_delta(end, before, difference, delta=delta, layout=layout)
            finally:
                if before != base:
                    before.unlink()
        return self._cache.admit(made, model.digest)

    async def _apply_delta(
        self, digest: Digest, base: Path, difference: Path, *, delta: Delta, layout: Layout
    ) -> Path:
        # The thread of a cancelled attempt may still write: each attempt has its own file.
        made = self._cache.path(digest).with_suffix(f".{next(self._attempts)}")
        found = await asyncio.to_thread(
            apply_delta, base, difference, made, layout=layout, scheme=delta.scheme
        )
        if found != digest:
            made.unlink()
            raise HyperGPUError(Reason.DIGEST_MISMATCH, f"base and delta do not give {digest}")
        return made

    async def _layout(self, calls: Calls, digest: Digest) -> Layout:
        """The layout, a blob as well: the daemon cannot build it, since that may need torch."""
        layout = self._layouts.get(digest)
        if layout is None:
            text = await self._download.fetch_small(calls, digest, JSON_BYTES_MAX)
            layout = self._layouts[digest] = layout_from_json(text)
        return layout
