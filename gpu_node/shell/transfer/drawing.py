"""A job's first model, drawn by this node's worker instead of fetched. Its digest has the last
word.
"""

import asyncio
from itertools import count
from pathlib import Path

import structlog

from gpu_node.shell.link.refusals import why
from gpu_node.shell.supervision import WorkerProcess
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.worker.messages import Draw, NotDrawn
from hypergpu.digest import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements.assignment import Assignment
from hypergpu.units import Milliseconds

log = structlog.get_logger()


class Drawing:
    """Has first models drawn. What once came out as another model is not tried again."""

    def __init__(self, cache: BlobCache, worker: WorkerProcess, limit_ms: Milliseconds) -> None:
        self._cache = cache
        self._worker = worker
        self._limit_s = limit_ms / 1000
        self._numbers = count()
        self._out_of_reach: set[Digest] = set()

    async def bring(self, assignment: Assignment) -> Path | None:
        """The job's first model, in the cache as if it had been fetched; None when it has to be."""
        initial = assignment.initial
        if initial is None or initial.digest in self._out_of_reach:
            return None
        number = next(self._numbers)
        made = self._cache.path(initial.digest).with_suffix(f".drawn{number}")
        task = assignment.task
        request = Draw(
            number=number,
            workload=task.workload,
            workload_version=task.workload_version,
            options=task.options,
            seed=initial.seed,
            model_path=str(made),
        )
        try:
            await self._draw(request)
            found = await asyncio.to_thread(digest_of_file, made)
            if found != initial.digest:
                detail = f"{found[:12]} was drawn here, {initial.digest[:12]} is the job's"
                raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
        except (HyperGPUError, OSError) as unusable:
            self._out_of_reach.add(initial.digest)
            log.warning("the first model is fetched, not drawn", reason=why(unusable))
            return None
        else:
            log.info("the first model was drawn here", digest=initial.digest)
            return self._cache.admit(made, initial.digest)
        finally:
            made.unlink(missing_ok=True)

    async def _draw(self, request: Draw) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                reply = await self._worker.draw(request)
        except TimeoutError:
            hangs = f"the worker drew nothing within {self._limit_s:g} s"
            self._worker.end(hangs)
            raise HyperGPUError(Reason.WORKER_UNUSABLE, hangs) from None
        if isinstance(reply, NotDrawn):
            raise HyperGPUError(Reason.WORKER_UNUSABLE, reply.reason)
