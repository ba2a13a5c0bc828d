"""A job's first model, computed by this node's worker instead of fetched.

A model is used only if its digest is the job's.
"""

import asyncio
from itertools import count
from pathlib import Path

import structlog

from gpu_node.shell.link.errors import describe_error
from gpu_node.shell.supervision.supervisor import WorkerSupervisor
from gpu_node.shell.transfer.cache import BlobCache
from hypergpu.digest import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements.assignment import Assignment
from hypergpu.units import Milliseconds

log = structlog.get_logger()


class InitialModels:
    """Computes first models. One that came out as another model is not tried again."""

    def __init__(self, cache: BlobCache, worker: WorkerSupervisor, limit_ms: Milliseconds) -> None:
        self._cache = cache
        self._worker = worker
        self._limit_s = limit_ms / 1000
        self._attempts = count()
        self._unreachable: set[Digest] = set()

    async def compute(self, assignment: Assignment) -> Path | None:
        """The job's first model in the cache; None where it has to be fetched."""
        initial = assignment.initial
        if initial is None or initial.digest in self._unreachable:
            return None
        suffix = f".computed{next(self._attempts)}"
        made = self._cache.path(initial.digest).with_suffix(suffix)
        try:
            await self._write(assignment, initial.seed, made)
            found = await asyncio.to_thread(digest_of_file, made)
            if found != initial.digest:
                detail = f"{found[:12]} was computed here, {initial.digest[:12]} is the job's"
                raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
        except (HyperGPUError, OSError) as unusable:
            self._unreachable.add(initial.digest)
            reason = describe_error(unusable)
            log.warning("the first model is fetched, not computed", reason=reason)
            return None
        else:
            log.info("the first model was computed here", digest=initial.digest)
            return self._cache.admit(made, initial.digest)
        finally:
            made.unlink(missing_ok=True)

    async def _write(self, assignment: Assignment, seed: int, path: Path) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._worker.write_initial_model(assignment.task, seed, path)
        except TimeoutError:
            detail = f"the worker computed no model within {self._limit_s:g} s"
            self._worker.end_worker(detail)
            raise HyperGPUError(Reason.WORKER_UNUSABLE, detail) from None
