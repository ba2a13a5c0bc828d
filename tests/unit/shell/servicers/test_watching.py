import asyncio
from pathlib import Path

from coordinator.core.events import JobStopped
from coordinator.shell.runtime.room import Room
from coordinator.shell.servicers.user.watching import watch
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, driving, parts_in, prepared_job


async def test_a_watch_ends_when_its_job_is_removed_before_all_is_told(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    async with driving(parts):
        room = await prepared_job(parts)
        await parts.driver.submit(JOB, JobStopped(at_ms=Milliseconds(0)))
    # As after a restart: what a watcher has not seen is in the journal alone.
    room = Room(room.job, room.next_sequence)
    parts.journal.remove_job(JOB)
    parts.driver.rooms.clear()

    async with asyncio.timeout(5):
        assert [message async for message in watch(parts, room, 1)] == []
