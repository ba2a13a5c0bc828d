import asyncio
from pathlib import Path

from coordinator.core.events import JobStopped, NodeJoined
from coordinator.shell.node_words import Capabilities
from coordinator.shell.runtime.room import Room
from coordinator.shell.runtime.roster import Session
from coordinator.shell.servicers.user.watching import participants, watch
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, parts_in, prepared_job


async def test_a_watch_ends_when_its_job_is_removed_before_all_is_told(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    async with driving(parts):
        room = await prepared_job(parts)
        await parts.driver.submit(JOB, JobStopped(at_ms=Milliseconds(0)))
    # As after a restart: what a watcher has not seen is in the journal alone.
    room = Room(room.job, room.next_sequence)
    parts.journal.remove_job(JOB)
    parts.driver.rooms.clear()

    async with asyncio.timeout(240):
        assert [message async for message in watch(parts, room, 1)] == []


async def test_a_participant_is_told_by_its_name_until_its_node_is_forgotten(
    tmp_path: Path,
) -> None:
    parts = parts_in(tmp_path)
    session = Session(NODE, Capabilities(name="attic", workloads={"digits-softmax": 1}), "test")
    parts.roster.connect(session)
    async with driving(parts):
        room = await prepared_job(parts)
        joined = NodeJoined(at_ms=Milliseconds(0), node=NODE)
        assert await parts.driver.submit(JOB, joined) == ""
    parts.roster.disconnect(session)
    assert [each.name for each in participants(parts.roster, room.job)] == ["attic"]
    parts.roster.forget(NODE)
    assert [each.name for each in participants(parts.roster, room.job)] == [""]
