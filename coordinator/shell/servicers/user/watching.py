"""`WatchJob`: the journal from a sequence number on, then live, with conflated progress."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

from coordinator.core.job import Job, Participant
from coordinator.shell import translate
from coordinator.shell.journal.records import Entry
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from coordinator.shell.runtime.roster import Roster
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId, Slot
from hypergpu.v1 import job_pb2

_PAGE_ENTRIES = 500
_PROGRESS_S = 0.25


def participants(roster: Roster, job: Job) -> list[job_pb2.ParticipantSummary]:
    """The open round's participants in slot order, then those that its plan lets rest."""
    round_ = job.round
    if round_ is None:
        return []
    ordered = sorted(round_.participants.items(), key=lambda item: item[1].slot)
    taking_part = [_summary(roster, node, participant) for node, participant in ordered]
    resting = [
        _resting(roster, node, job.members[node].slot, why)
        for node, why in sorted(round_.resting.items())
    ]
    return [*taking_part, *resting]


def _summary(roster: Roster, node: NodeId, participant: Participant) -> job_pb2.ParticipantSummary:
    message = translate.participant_summary(node, participant, roster.progress.get(node))
    message.name = roster.name_of(node)
    return message


def _resting(roster: Roster, node: NodeId, slot: Slot, why: str) -> job_pb2.ParticipantSummary:
    return job_pb2.ParticipantSummary(
        node_id=node,
        slot=slot,
        state="resting",
        loss=math.nan,
        reason=why,
        name=roster.name_of(node),
    )


async def watch(
    parts: Parts, room: Room, from_sequence: int
) -> AsyncIterator[job_pb2.WatchJobResponse]:
    """Serve one watcher until it leaves, or the job has ended and everything is told."""
    following = from_sequence
    told_version = -1
    while True:
        change = room.change()
        page = await _entries(parts, room, following)
        for entry in page:
            following = entry.sequence + 1
            yield job_pb2.WatchJobResponse(event=translate.event_message(entry))
        if following < room.next_sequence and (page or not _is_removed(parts, room)):
            continue
        if _is_over(parts, room):
            return
        if room.progress_version != told_version:
            told_version = room.progress_version
            report = job_pb2.ProgressReport(participants=participants(parts.roster, room.job))
            yield job_pb2.WatchJobResponse(progress=report)
        await _wait(change, _PROGRESS_S)


async def _entries(parts: Parts, room: Room, following: int) -> Sequence[Entry]:
    recent = room.recent(following)
    if recent is not None:
        return recent
    reading = await asyncio.to_thread(
        parts.journal.read, room.job.job_id, following, limit=_PAGE_ENTRIES
    )
    if not reading.entries and reading.damage is not None:
        raise HyperGPUError(Reason.JOURNAL_DAMAGED, reading.damage.reason)
    return reading.entries


def _is_over(parts: Parts, room: Room) -> bool:
    if parts.driver.is_closing or _is_removed(parts, room):
        return True
    return room.job.is_over and not room.job.evaluating


def _is_removed(parts: Parts, room: Room) -> bool:
    """Whether the job is gone, and soon its rows, told or not."""
    return room.job.job_id not in parts.driver.rooms


async def _wait(change: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await change.wait()
    except TimeoutError:
        return
