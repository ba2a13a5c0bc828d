"""The watch of a job's journal."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from coordinator.shell import translate
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.training.job_runtime import training_of
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.service.job_view import OwnNodes, own_entries, participants
from coordinator.shell.store.journal.records import Entry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import job_pb2

_PAGE_ENTRIES = 500
_PROGRESS_S = 0.25


async def watch_job(
    driver: Driver,
    nodes: ConnectedNodes,
    runtime: WorkRuntime[Any],
    request: job_pb2.WatchJobRequest,
    own: OwnNodes = None,
) -> AsyncIterator[job_pb2.WatchJobResponse]:
    """Serve one watcher until it leaves, or the job has ended and everything is told.

    Args:
        driver: Its journal has what is no longer in memory.
        nodes: Names and progress of the participants.
        runtime: The job.
        request: From which event on, and whether progress is wanted.
        own: Of nodes only these are told; None: all.
    """
    next_sequence = request.from_sequence
    told_version = -1
    while True:
        change = runtime.change()
        page = await _entries(driver, runtime, next_sequence)
        if page:
            next_sequence = page[-1].sequence + 1
        for entry in own_entries(page, own):
            yield job_pb2.WatchJobResponse(event=translate.event_message(entry))
        if next_sequence < runtime.next_sequence and (page or not _is_removed(driver, runtime)):
            continue
        if _is_over(driver, runtime):
            return
        training = None if request.events_only else training_of(runtime)
        if training is not None and training.progress_version != told_version:
            told_version = training.progress_version
            participant_list = participants(nodes, training.job, own)
            report = job_pb2.ProgressReport(participants=participant_list)
            yield job_pb2.WatchJobResponse(progress=report)
        await _wait(change, _PROGRESS_S)


async def _entries(driver: Driver, runtime: WorkRuntime[Any], following: int) -> Sequence[Entry]:
    recent = runtime.recent_entries(following)
    if recent is not None:
        return recent
    reading = await asyncio.to_thread(
        driver.journal.read, runtime.job.job_id, following, limit=_PAGE_ENTRIES
    )
    if not reading.entries and reading.damage:
        raise HyperGPUError(Reason.JOURNAL_DAMAGED, reading.damage)
    return reading.entries


def _is_over(driver: Driver, runtime: WorkRuntime[Any]) -> bool:
    if driver.is_closing or _is_removed(driver, runtime):
        return True
    return driver.kinds.of_job(runtime.job).core.is_complete(runtime.job)


def _is_removed(driver: Driver, runtime: WorkRuntime[Any]) -> bool:
    """Whether the job is gone, and soon its rows, told or not."""
    return runtime.job.job_id not in driver.runtimes


async def _wait(change: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await change.wait()
    except TimeoutError:
        return
