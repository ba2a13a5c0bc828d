"""The model of an assignment: from the cache, by a small delta from the model before, or whole."""

import asyncio
from itertools import count
from pathlib import Path

import grpc
import structlog

from gpu_node.core.assignment import Assignment, BlobRef, Delta
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.refusals import refusal_in, why
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import Download
from hypergpu.codec import ApplyError, apply_delta
from hypergpu.ids import Digest
from hypergpu.layout import JSON_BYTES_MAX, Layout, LayoutError, layout_from_json
from hypergpu.refusal import Reason, RefusalError

log = structlog.get_logger()


class Models:
    """Brings models. Raises what `Download.fetch` raises."""

    def __init__(self, cache: BlobCache, download: Download) -> None:
        self._cache = cache
        self._download = download
        self._layouts: dict[Digest, Layout] = {}
        self._attempts = count()

    async def bring(self, calls: Calls, assignment: Assignment) -> Path:
        """The assigned model's file, whole and checked."""
        model = assignment.task.model
        path = await self._cache.held(model)
        if path is None and assignment.delta is not None:
            path = await self._advanced(calls, assignment, assignment.delta)
        if path is None:
            path = await self._download.fetch(calls, model)
        self._cache.use_model(assignment.lease.job_id, model.digest)
        return path

    async def _advanced(self, calls: Calls, assignment: Assignment, delta: Delta) -> Path | None:
        """The model made of the one before; None when the whole model has to be fetched."""
        model = assignment.task.model
        base = await self._cache.held(BlobRef(delta.base, model.size_bytes))
        if base is None:
            return None
        try:
            layout = await self._layout(calls, assignment.task.layout)
            difference = await self._download.fetch(calls, delta.blob)
            return await self._applied(model, base, difference, layout=layout, scheme=delta.scheme)
        except grpc.aio.AioRpcError as broken:
            if refusal_in(broken) is None:
                raise
            reason = why(broken)
        except (RefusalError, ApplyError, LayoutError, ValueError) as unusable:
            reason = why(unusable)
        finally:
            self._cache.discard((delta.blob.digest,))
        log.warning("the delta is of no use: fetching the whole model", reason=reason)
        return None

    async def _applied(
        self, model: BlobRef, base: Path, difference: Path, *, layout: Layout, scheme: str
    ) -> Path:
        # A cancelled attempt's thread may still write: each attempt has a file of its own.
        made = self._cache.path(model.digest).with_suffix(f".{next(self._attempts)}")
        digest = await asyncio.to_thread(
            apply_delta, base, difference, made, layout=layout, scheme=scheme
        )
        if digest != model.digest:
            made.unlink()
            raise RefusalError(Reason.DIGEST_MISMATCH, f"base and delta do not give {model.digest}")
        return self._cache.admit(made, model.digest)

    async def _layout(self, calls: Calls, digest: Digest) -> Layout:
        """The layout, a blob as well: the daemon cannot build it, since that may need torch."""
        layout = self._layouts.get(digest)
        if layout is None:
            text = await self._download.fetch_small(calls, digest, JSON_BYTES_MAX)
            layout = self._layouts[digest] = layout_from_json(text)
        return layout
