import asyncio
from collections.abc import Collection
from pathlib import Path

from coordinator.core.job.events import NodeJoined, NodeLost
from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.upload_store import UploadStore
from coordinator.shell.journal.records import NodeRecord
from coordinator.shell.runtime.job_runtime import upload_owner
from coordinator.shell.runtime.maintenance import BlobCollector, store_node_counts
from hypergpu.digest import digest_of
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes, Milliseconds
from tests.journals import FolderJournal
from tests.unit.shell.whole_shell import JOB, NODE, driving, prepared_job, services_in

CONTENT = bytes(range(200))
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
OWNER = upload_owner(JOB, NODE)
NOW = Milliseconds(0)


class ObservedUploads(UploadStore):
    """Says how many uploads each look threw away."""

    forgotten: "asyncio.Queue[int]"
    loop: asyncio.AbstractEventLoop

    def forget(self, uploads: Collection[Path], *, keeps: Collection[str]) -> int:
        count = super().forget(uploads, keeps=keeps)
        self.loop.call_soon_threadsafe(self.forgotten.put_nowait, count)
        return count


async def test_what_could_not_be_stored_is_counted_until_it_can(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path)
    journal.record_node(NodeRecord(NODE, b"", b"{}", "test", 0, 0))
    journal.is_full = True
    services = services_in(tmp_path, journal)
    services.nodes.count(NODE, accepted=2)
    await store_node_counts(services)
    services.nodes.count(NODE, accepted=1, refused=1)
    assert services.nodes.unstored_counts(NODE) == (3, 1)

    journal.is_full = False
    await store_node_counts(services)
    (stored,) = journal.nodes()
    assert (stored.updates_accepted, stored.updates_refused) == (3, 1)
    assert services.nodes.unstored_counts(NODE) == (0, 0)


async def test_an_upload_is_thrown_away_once_its_lease_has_ended(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    uploads = ObservedUploads(tmp_path, services.blobs, Space(tmp_path, 0))
    uploads.forgotten, uploads.loop = asyncio.Queue(), asyncio.get_running_loop()
    services = services._replace(uploads=uploads)
    collector = BlobCollector(services)
    collecting = asyncio.create_task(collector.run())
    async with driving(services), asyncio.timeout(240):
        await prepared_job(services)
        assert not await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE))
        uploads.open("update", BLOB, owner=OWNER).append(0, CONTENT[:120])
        collector.request()
        assert await uploads.forgotten.get() == 0

        assert not await services.driver.submit(JOB, NodeLost(at_ms=NOW, node=NODE, reason="cable"))
        collector.request()
        assert await uploads.forgotten.get() == 1
    assert uploads.committed_offset("update", owner=OWNER) == 0
    collecting.cancel()
