"""`WatchJob`: the journal from a sequence number on, then live, with conflated progress."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

from coordinator.core.job.state import Job, Participant
from coordinator.shell import translate
from coordinator.shell.journal.records import Entry
from coordinator.shell.runtime.connected_nodes import ConnectedNodes
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId, Slot
from hypergpu.v1 import job_pb2

_PAGE_ENTRIES = 500
_PROGRESS_S = 0.25


def participants(connected: ConnectedNodes, job: Job) -> list[job_pb2.ParticipantSummary]:
    """The open round's participants in slot order, then those that its plan lets rest."""
    round_ = job.round
    if round_ is None:
        return []
    ordered = sorted(round_.participants.items(), key=lambda item: item[1].slot)
    taking_part = [_summary(connected, node, participant) for node, participant in ordered]
    resting = [
        _resting(connected, node, job.members[node].slot, why)
        for node, why in sorted(round_.resting.items())
    ]
    return [*taking_part, *resting]


def _summary(
    connected: ConnectedNodes, node: NodeId, participant: Participant
) -> job_pb2.ParticipantSummary:
    message = translate.participant_summary(node, participant, connected.progress.get(node))
    message.name = connected.name_of(node)
    return message


def _resting(
    connected: ConnectedNodes, node: NodeId, slot: Slot, why: str
) -> job_pb2.ParticipantSummary:
    return job_pb2.ParticipantSummary(
        node_id=node,
        slot=slot,
        state="resting",
        loss=math.nan,
        reason=why,
        name=connected.name_of(node),
    )


async def watch_job(
    services: Services, runtime: JobRuntime, from_sequence: int
) -> AsyncIterator[job_pb2.WatchJobResponse]:
    """Serve one watcher until it leaves, or the job has ended and everything is told."""
    following = from_sequence
    told_version = -1
    while True:
        change = runtime.change()
        page = await _entries(services, runtime, following)
        for entry in page:
            following = entry.sequence + 1
            yield job_pb2.WatchJobResponse(event=translate.event_message(entry))
        if following < runtime.next_sequence and (page or not _is_removed(services, runtime)):
            continue
        if _is_over(services, runtime):
            return
        if runtime.progress_version != told_version:
            told_version = runtime.progress_version
            report = job_pb2.ProgressReport(participants=participants(services.nodes, runtime.job))
            yield job_pb2.WatchJobResponse(progress=report)
        await _wait(change, _PROGRESS_S)


async def _entries(services: Services, runtime: JobRuntime, following: int) -> Sequence[Entry]:
    recent = runtime.recent_entries(following)
    if recent is not None:
        return recent
    reading = await asyncio.to_thread(
        services.journal.read, runtime.job.job_id, following, limit=_PAGE_ENTRIES
    )
    if not reading.entries and reading.damage:
        raise HyperGPUError(Reason.JOURNAL_DAMAGED, reading.damage)
    return reading.entries


def _is_over(services: Services, runtime: JobRuntime) -> bool:
    if services.driver.is_closing or _is_removed(services, runtime):
        return True
    return runtime.job.is_over and not runtime.job.evaluating


def _is_removed(services: Services, runtime: JobRuntime) -> bool:
    """Whether the job is gone, and soon its rows, told or not."""
    return runtime.job.job_id not in services.driver.runtimes


async def _wait(change: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await change.wait()
    except TimeoutError:
        return
