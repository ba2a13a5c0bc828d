"""Takes jobs up after a start: checks their files, then performs what is outstanding."""

import asyncio
from collections.abc import Iterable

import structlog

from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.state import ENDED, Job
from coordinator.core.work.work_events import CoordinatorChanged
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performing import pause, perform_outstanding
from coordinator.shell.kinds.training.preparation import load_layout
from coordinator.shell.kinds.training.weighing import prepare_gradient
from coordinator.shell.services import Services
from coordinator.shell.store.blobs.manifests import manifest_digests, stored_manifest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Milliseconds

log = structlog.get_logger()
_STORE_AGAIN_S = 2.0


async def take_up(services: Services, runtime: JobRuntime) -> None:
    """Check a job's files and perform everything that is outstanding, or pause it with the reason.

    The job answers questions meanwhile, and its nodes may dial in; they get their work afterwards.
    """
    is_open = runtime.job.phase not in ENDED
    if is_open:
        present = [node for node, member in runtime.job.members.items() if member.is_present]
        services.nodes.expect(present, Milliseconds(services.settings.reconnect_grace_ms))
        await _tell_restart(services, runtime)
    try:
        damage = await _check_files(services, runtime)
    except Exception as broken:
        why = broken.message if isinstance(broken, HyperGPUError) else repr(broken)
        log.exception("a job cannot be taken up", job_id=runtime.job.job_id)
        damage = ""
        if is_open:
            await pause(services, runtime, f"it cannot go on after the restart: {why}")
    finally:
        runtime.is_recovering = False
    if damage and (model := runtime.job.model):
        await services.driver.report_lost_model(runtime.job.job_id, model.blob.digest, damage)
    if not runtime.is_given_up:
        # Also what a node that missed the model has caused while nothing was performed.
        perform_outstanding(services, runtime)
    if is_open:
        prepare_gradient(services, runtime)
        failpoint("recover.done")
        services.allocator.review()


async def _tell_restart(services: Services, runtime: JobRuntime) -> None:
    """Journal a takeover, and any restart in a round in which nodes may be timed."""
    runtime.takeover = services.journal.database.takeover
    is_timed = runtime.job.round is not None and runtime.job.spec.strategy == "aware"
    if runtime.takeover or is_timed:
        reason = runtime.takeover or "the coordinator was started again"
        changed = CoordinatorChanged(at_ms=Milliseconds(0), reason=reason)
        await services.driver.insist(runtime.job.job_id, changed)


async def _check_files(services: Services, runtime: JobRuntime) -> str:
    """Read the job's files. Returns what is wrong with its model and not reported yet.

    Raises:
        HyperGPUError: Its layout is lost and cannot be made again.
    """
    job = runtime.job
    if job.phase not in ENDED:
        await _bring_blobs(services, runtime, live_blobs(job) | {job.layout})
    if job.manifest is not None:
        try:
            manifest = await asyncio.to_thread(stored_manifest, services.blobs, job.manifest)
            runtime.entries_of_manifest = manifest_digests(manifest)
        except HyperGPUError as missing:
            log.warning("a job's manifest is damaged", job_id=job.job_id, reason=missing.detail)
        if job.phase not in ENDED:
            await _bring_blobs(services, runtime, runtime.entries_of_manifest or ())
    await load_layout(services, runtime)
    if job.phase in ENDED or job.lost_model:
        return ""
    return await asyncio.to_thread(_damage, services, job)


async def _bring_blobs(services: Services, runtime: JobRuntime, digests: Iterable[Digest]) -> None:
    """Fetch what another coordinator left in the object store, however long that is away."""
    while True:
        try:
            with runtime.tell_obstacle():
                return await asyncio.to_thread(services.blobs.bring, digests)
        except HyperGPUError as refused:
            if refused.reason not in {Reason.STORE_UNREACHABLE, Reason.DISK_FULL}:
                raise
            await asyncio.sleep(_STORE_AGAIN_S)


def _damage(services: Services, job: Job) -> str:
    """Damage of the current model's files; empty when they are sound."""
    if job.model is None:
        return ""
    # Older deltas cannot be made again; a node that needs a lost one fetches the whole model.
    for blob in job.model.newest_blobs:
        try:
            services.blobs.path(blob.digest)
        except HyperGPUError as missing:
            return missing.detail
    return ""
