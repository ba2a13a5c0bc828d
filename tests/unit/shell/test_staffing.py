import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from coordinator.core.events import Event, JobPaused, NodeJoined, UpdateRefused
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.journal.records import Entry, RequestClaim
from coordinator.shell.runtime.driver import Arrival, decide
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, connected, driving, parts_in, prepared_job

NOW = Milliseconds(0)


class SlowJournal(MemoryJournal):
    """Writes the join of a node only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_joining = threading.Event()
        self.may_write = threading.Event()

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        if any(entry.kind == NodeJoined.__name__ for entry in entries):
            self.is_joining.set()
            assert self.may_write.wait(240)
        super().append(entries, claims)


async def test_a_node_lost_while_its_join_is_written_is_lost_to_its_job(tmp_path: Path) -> None:
    journal = SlowJournal()
    parts = parts_in(tmp_path, journal)
    async with driving(parts), asyncio.timeout(240):
        room = await prepared_job(parts)
        connected(parts)
        staffing = asyncio.create_task(parts.staffing.run())
        parts.staffing.review()
        await asyncio.to_thread(journal.is_joining.wait)
        await parts.staffing.lose(NODE, "its cable was cut")
        journal.may_write.set()
        while NODE not in room.job.members or room.job.members[NODE].is_present:
            await room.change().wait()
        staffing.cancel()


async def test_a_node_drained_while_its_join_is_written_leaves(tmp_path: Path) -> None:
    journal = SlowJournal()
    parts = parts_in(tmp_path, journal)
    async with driving(parts), asyncio.timeout(240):
        room = await prepared_job(parts)
        connected(parts)
        staffing = asyncio.create_task(parts.staffing.run())
        parts.staffing.review()
        await asyncio.to_thread(journal.is_joining.wait)
        await parts.staffing.drain(NODE, "maintenance")
        journal.may_write.set()
        while NODE not in room.job.members or not room.job.members[NODE].is_leaving:
            await room.change().wait()
        staffing.cancel()


async def test_nodes_are_not_dealt_out_afresh_for_what_happens_within_a_round(
    tmp_path: Path,
) -> None:
    parts = parts_in(tmp_path)
    joined = NodeJoined(at_ms=NOW, node=NODE)
    refused = UpdateRefused(at_ms=NOW, node=NODE, round=0, reason="late")
    async with driving(parts):
        room = await prepared_job(parts)

        def moves_nodes(event: Event) -> bool:
            verdict = asyncio.get_running_loop().create_future()
            return decide({JOB: room}, [Arrival(JOB, event, verdict)]).moves_nodes

        assert moves_nodes(joined)
        await parts.driver.submit(JOB, joined)
        assert not moves_nodes(refused)
        assert moves_nodes(JobPaused(at_ms=NOW))
