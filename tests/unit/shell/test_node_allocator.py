import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.core.job.events import Event, JobPaused, NodeJoined, UpdateRejected
from coordinator.shell.journal.records import Entry, RequestClaim
from coordinator.shell.runtime.driver import SubmittedEvent, decide
from hypergpu.units import Milliseconds
from tests.journals import FolderJournal
from tests.unit.shell.whole_shell import JOB, NODE, connect_node, driving, prepared_job, services_in

NOW = Milliseconds(0)


class SlowJournal(FolderJournal):
    """Writes the join of a node only when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_joining = threading.Event()
        self.may_write = threading.Event()

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        if any(entry.kind == NodeJoined.__name__ for entry in entries):
            self.is_joining.set()
            assert self.may_write.wait(240)
        super().append(entries, claims)


@pytest.mark.parametrize("departure", ["lose", "drain"])
async def test_a_node_lost_or_drained_while_its_join_is_written_leaves_its_job(
    tmp_path: Path, departure: str
) -> None:
    journal = SlowJournal(tmp_path)
    services = services_in(tmp_path, journal)
    allocator = services.allocator
    async with driving(services), asyncio.timeout(240):
        runtime = await prepared_job(services)
        connect_node(services)
        allocating = asyncio.create_task(allocator.run())
        allocator.review()
        await asyncio.to_thread(journal.is_joining.wait)
        await getattr(allocator, departure)(NODE, "maintenance")
        journal.may_write.set()
        while not (member := runtime.job.members.get(NODE)) or (
            member.is_present and not member.is_leaving
        ):
            await runtime.change().wait()
        assert member.is_present == (departure == "drain")
        allocating.cancel()


async def test_nodes_are_not_dealt_out_afresh_for_what_happens_within_a_round(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    joined = NodeJoined(at_ms=NOW, node=NODE)
    refused = UpdateRejected(at_ms=NOW, node=NODE, round=0, reason="late")
    async with driving(services):
        runtime = await prepared_job(services)

        def moves_nodes(event: Event) -> bool:
            verdict = asyncio.get_running_loop().create_future()
            return decide({JOB: runtime}, [SubmittedEvent(JOB, event, verdict)]).moves_nodes

        assert moves_nodes(joined)
        await services.driver.submit(JOB, joined)
        assert not moves_nodes(refused)
        assert moves_nodes(JobPaused(at_ms=NOW))
