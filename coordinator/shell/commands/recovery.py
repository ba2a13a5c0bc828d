"""After a start: check each replayed job's files and perform its outstanding commands."""

import asyncio

import structlog

from coordinator.core.job.events import ModelLost
from coordinator.core.job.state import ENDED, Job
from coordinator.shell.commands.datasets import manifest_digests, stored_manifest
from coordinator.shell.commands.perform import pause, perform_outstanding
from coordinator.shell.commands.preparation import load_layout
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.units import Milliseconds

log = structlog.get_logger()


async def take_up(services: Services, runtime: JobRuntime) -> None:
    """Check a job's files and perform everything that is outstanding, or pause it with the reason.

    The job answers questions meanwhile, and its nodes may dial in; they get their work afterwards.
    """
    is_open = runtime.job.phase not in ENDED
    if is_open:
        present = [node for node, member in runtime.job.members.items() if member.is_present]
        services.nodes.expect(present, Milliseconds(services.settings.reconnect_grace_ms))
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
    if damage:
        await _report(services, runtime, damage)
    elif not runtime.is_given_up:
        perform_outstanding(services, runtime)
    if is_open:
        failpoint("recover.done")
        services.allocator.review()


async def _report(services: Services, runtime: JobRuntime, damage: str) -> None:
    if runtime.job.model is None:
        raise AssertionError("only a model is damaged")
    log.error("a model is damaged", job_id=runtime.job.job_id, reason=damage)
    digest = runtime.job.model.blob.digest
    event = ModelLost(at_ms=Milliseconds(0), model=digest, reason=damage)
    await services.driver.insist(runtime.job.job_id, event)


async def _check_files(services: Services, runtime: JobRuntime) -> str:
    """Read the job's files. Returns what is wrong with its model and not reported yet.

    Raises:
        HyperGPUError: Its layout is lost and cannot be made again.
    """
    job = runtime.job
    if job.manifest is not None:
        try:
            manifest = await asyncio.to_thread(stored_manifest, services.blobs, job.manifest)
            runtime.entries_of_manifest = manifest_digests(manifest)
        except HyperGPUError as missing:
            log.warning("a job's manifest is damaged", job_id=job.job_id, reason=missing.detail)
    await load_layout(services, runtime)
    if job.phase in ENDED or job.lost_model:
        return ""
    return await asyncio.to_thread(_damage, services, job)


def _damage(services: Services, job: Job) -> str:
    """Damage of the current model's files; empty when they are sound."""
    if job.model is None:
        return ""
    model, newest = job.model, job.model.newest_delta
    # Older deltas cannot be made again; a node that needs a lost one fetches the whole model.
    blobs = (model.blob, model.outer_state, newest.blob if newest else None)
    for blob in blobs:
        if blob is None:
            continue
        try:
            services.blobs.path(blob.digest)
        except HyperGPUError as missing:
            return missing.detail
    return ""
