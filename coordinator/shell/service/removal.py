"""Removal of ended jobs: their rows, their files, and the blobs that only they needed."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.store.blob_collector import BlobNeeds, collect
from coordinator.shell.store.datasets import laid_out_manifests, remove_dataset
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentsPlugin
from hypergpu.ids import JobId
from hypergpu.units import Bytes

log = structlog.get_logger()


@dataclass(frozen=True)
class JobRemoval:
    """Removes jobs."""

    driver: Driver
    storage: Storage
    needs: BlobNeeds
    payments: PaymentsPlugin | None

    async def remove(self, find: Callable[[], WorkRuntime[Any]]) -> Bytes:
        """Remove an ended job once all its work is receipted. Returns how much that freed.

        Args:
            find: The job; it raises where somebody else has removed it meanwhile.

        Raises:
            HyperGPUError: JOB_PHASE, it has not ended; or what ``find`` raises.
        """
        await self._settle_ended(find())
        runtime = find()
        del self.driver.runtimes[runtime.job.job_id]
        runtime.close()
        runtime.wake()
        return await self._remove_rows(runtime.job.job_id)

    async def remove_unreadable(self, job_id: JobId) -> Bytes:
        """Remove a job that this version cannot replay. Returns how much that freed."""
        del self.driver.unreadable[job_id]
        return await self._remove_rows(job_id)

    async def _remove_rows(self, job_id: JobId) -> Bytes:
        await self.driver.in_writer(self.driver.journal.remove_job, job_id)
        await asyncio.to_thread(self._delete_files, job_id)
        freed_bytes = await collect(self.storage, self.needs)
        log.info("a job was removed", job_id=job_id, freed_bytes=freed_bytes)
        return freed_bytes

    async def _settle_ended(self, runtime: WorkRuntime[Any]) -> None:
        """Have everything of an ended job receipted before its rows go."""
        job = runtime.job
        machine = self.driver.kinds.of_job(job).core
        if not machine.has_ended(job):
            detail = f"{job.job_id} is {machine.phase_name(job)}: stop it first (hypergpu job stop)"
            raise HyperGPUError(Reason.JOB_PHASE, detail)
        if machine.packed is not None and not machine.is_complete(job):
            detail = f"{job.job_id} is {machine.phase_name(job)}: its nodes sign what they gave"
            raise HyperGPUError(Reason.JOB_PHASE, detail, fix="remove it once it has stopped")
        if self.payments is not None and machine.paid_by:
            await self.payments.catch_up(job.job_id)

    def _delete_files(self, job_id: JobId) -> None:
        shutil.rmtree(self.storage.job_dir(job_id), ignore_errors=True)
        if self.driver.unreadable:
            return  # Nobody knows whose data those need.
        # Listed before the jobs are asked: a folder that a new job lays out is not in the list.
        laid_out_digests = laid_out_manifests(self.storage.datasets_dir)
        jobs = list(self.driver.runtimes_of(JobRuntime).values())
        manifests = [runtime.job.manifest for runtime in jobs]
        needed_digests = {manifest.digest for manifest in manifests if manifest is not None}
        for digest in laid_out_digests:
            if digest not in needed_digests:
                remove_dataset(self.storage.datasets_dir, digest)
