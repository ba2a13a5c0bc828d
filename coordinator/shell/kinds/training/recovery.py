"""Takes jobs up after a start: checks their files, then performs what is outstanding."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.state import ENDED, Job
from coordinator.core.work.work_events import CoordinatorChanged
from coordinator.shell.driver.performing import Performing
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.lost_model import report_lost_model
from coordinator.shell.kinds.training.preparation import ModelPreparation
from coordinator.shell.kinds.training.weighing import UpdateWeighing
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.store.blobs.manifests import manifest_digests, stored_manifest
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Milliseconds

log = structlog.get_logger()
_STORE_AGAIN_S = 2.0


@dataclass(frozen=True)
class JobRecovery:
    """Takes training jobs up after a start of this process."""

    performing: Performing
    storage: Storage
    fleet: Fleet
    preparation: ModelPreparation
    weighing: UpdateWeighing
    grace_ms: Milliseconds
    """Time that nodes have to dial in again."""

    async def take_up(self, runtime: JobRuntime) -> None:
        """Check a job's files and perform everything that is outstanding, or pause it with the
        reason.

        The job answers questions meanwhile, and its nodes may dial in; they get their work
        afterwards.
        """
        is_open = runtime.job.phase not in ENDED
        if is_open:
            present = [node for node, member in runtime.job.members.items() if member.is_present]
            self.fleet.nodes.expect(present, self.grace_ms)
            await self._tell_restart(runtime)
        try:
            damage = await self._check_files(runtime)
        except Exception as error:
            why = error.message if isinstance(error, HyperGPUError) else repr(error)
            log.exception("a job cannot be taken up", job_id=runtime.job.job_id)
            damage = ""
            if is_open:
                await self.performing.pause(runtime, f"it cannot go on after the restart: {why}")
        finally:
            runtime.is_recovering = False
        if damage and (model := runtime.job.model):
            await report_lost_model(
                self.performing.driver, runtime.job.job_id, model.blob.digest, damage
            )
        if not runtime.is_given_up:
            # Also what a node that missed the model has caused while nothing was performed.
            self.performing.perform_outstanding(runtime)
        if is_open:
            self.weighing.prepare_gradient(runtime)
            self.weighing.prepare_own(runtime)
            failpoint("recover.done")
            self.fleet.allocator.review()

    async def _tell_restart(self, runtime: JobRuntime) -> None:
        """Journal a takeover, and any restart in a round in which nodes may be timed."""
        runtime.takeover = self.performing.driver.journal.database.takeover
        is_timed = runtime.job.round is not None and runtime.job.spec.strategy == "aware"
        if runtime.takeover or is_timed:
            reason = runtime.takeover or "the coordinator was started again"
            change_event = CoordinatorChanged(at_ms=Milliseconds(0), reason=reason)
            await self.performing.driver.insist(runtime.job.job_id, change_event)

    async def _check_files(self, runtime: JobRuntime) -> str:
        """Read the job's files. Returns what is wrong with its model and not reported yet.

        Raises:
            HyperGPUError: Its layout is lost and cannot be made again.
        """
        job = runtime.job
        if job.phase not in ENDED:
            await self._bring_blobs(runtime, live_blobs(job) | {job.layout})
        if job.manifest is not None:
            try:
                manifest = await asyncio.to_thread(
                    stored_manifest, self.storage.blobs, job.manifest
                )
                runtime.entries_of_manifest = manifest_digests(manifest)
            except HyperGPUError as error:
                log.warning("a job's manifest is damaged", job_id=job.job_id, reason=error.detail)
            if job.phase not in ENDED:
                await self._bring_blobs(runtime, runtime.entries_of_manifest or ())
        await self.preparation.load_layout(runtime)
        if job.phase in ENDED or job.lost_model:
            return ""
        return await asyncio.to_thread(self._damage, job)

    async def _bring_blobs(self, runtime: JobRuntime, digests: Iterable[Digest]) -> None:
        """Fetch what another coordinator left in the object store, however long that is away."""
        while True:
            try:
                with runtime.tell_obstacle():
                    return await asyncio.to_thread(self.storage.blobs.bring, digests)
            except HyperGPUError as error:
                if error.reason not in {Reason.STORE_UNREACHABLE, Reason.DISK_FULL}:
                    raise
                await asyncio.sleep(_STORE_AGAIN_S)

    def _damage(self, job: Job) -> str:
        """Damage of the current model's files; empty when they are sound."""
        if job.model is None:
            return ""
        # Older deltas cannot be made again; a node that needs a lost one fetches the whole model.
        for blob in job.model.newest_blobs:
            try:
                self.storage.blobs.path(blob.digest)
            except HyperGPUError as error:
                return error.detail
        return ""
