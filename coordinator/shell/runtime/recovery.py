"""After a start: replay every job, check its model, perform what is outstanding."""

import asyncio
from typing import NamedTuple

import structlog

from coordinator.core.events import ModelLost
from coordinator.core.job import ENDED, Job
from coordinator.shell.failpoints import failpoint
from coordinator.shell.journal.interface import JobJournal
from coordinator.shell.journal.records import JournalError
from coordinator.shell.journal.recovery import recover
from coordinator.shell.runtime import rows
from coordinator.shell.runtime.acts.datasets import manifest_digests, stored_manifest
from coordinator.shell.runtime.acts.layouts import stored_layout
from coordinator.shell.runtime.acts.perform import pause, perform_outstanding
from coordinator.shell.runtime.acts.preparation import layout_made_again
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds

log = structlog.get_logger()


class Replay(NamedTuple):
    """Every job of a journal."""

    runtimes: dict[JobId, JobRuntime]
    unreadable: dict[JobId, str]
    """Jobs whose rows this version does not know, and why."""


def replay_jobs(journal: JobJournal) -> Replay:
    """Every job as far as its journal holds; a damaged end is cut off and reported. Blocks."""
    replay = Replay({}, {})
    for job_id in journal.jobs():
        try:
            runtime = _replay_job(journal, job_id)
        except JournalError:
            raise
        except Exception as broken:
            log.exception("a job cannot be replayed and rests", job_id=job_id)
            replay.unreadable[job_id] = f"{type(broken).__name__}: {broken}"
            continue
        if runtime is None:
            log.error("nothing of a job's journal holds: the job is removed", job_id=job_id)
            journal.remove_job(job_id)
        else:
            replay.runtimes[job_id] = runtime
    return replay


def _replay_job(journal: JobJournal, job_id: JobId) -> JobRuntime | None:
    recovery = recover(journal, job_id)
    for damage in recovery.damages:
        log.error("a journal is damaged and cut back", job_id=job_id, reason=damage.reason)
    snapshot, entries = recovery.snapshot, recovery.entries
    before = rows.state_from(snapshot.state_json) if snapshot else None
    job = rows.replay(before, entries)
    if job is None:
        return None
    last = entries[-1].sequence if entries or snapshot is None else snapshot.head.sequence
    runtime = JobRuntime(job, last + 1)
    runtime.is_recovering = True
    return runtime


async def take_up(services: Services, runtime: JobRuntime) -> None:
    """Check a job's files and perform everything that is outstanding, or pause it with the reason.

    The job answers questions meanwhile, and its nodes may dial in; they get their work afterwards.
    """
    is_open = runtime.job.phase not in ENDED
    if is_open:
        present = [node for node, member in runtime.job.members.items() if member.is_present]
        services.roster.expect(present, Milliseconds(services.settings.reconnect_grace_ms))
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
        services.staffing.review()


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


async def load_layout(services: Services, runtime: JobRuntime) -> None:
    """Find the layout of a job that has a model, or make it again.

    Raises:
        HyperGPUError: It cannot be made again.
    """
    job = runtime.job
    if job.model is None or runtime.layout is not None:
        return
    stored = await asyncio.to_thread(stored_layout, services.job_dir(job.job_id))
    runtime.layout = stored or await layout_made_again(services, job)


def _damage(services: Services, job: Job) -> str:
    """What is wrong with the current model's files; empty when they are sound."""
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
