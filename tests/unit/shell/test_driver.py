"""Jobs driven: event after event, after a start, in quiet times, with nodes lent."""

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

import pytest

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.job.commands import Command, InitialiseModel
from coordinator.core.training.job.events import Event, JobCreated, UpdateRejected
from coordinator.core.training.job.state import Phase
from coordinator.core.work.work_events import JobPaused, NodeJoined, NodeLost
from coordinator.shell.app.periodic_work import store_node_counts
from coordinator.shell.driver.decisions import Decision, decide
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.inbox import SubmittedEvent
from coordinator.shell.driver.replay import replay_jobs
from coordinator.shell.evaluator.process import Initialise, Initialised
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime, upload_owner
from coordinator.shell.store.blob_collector import BlobCollector, collect
from coordinator.shell.store.blobs.manifests import packed_manifest
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import QUARANTINE, UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.journal.records import Entry, NodeRecord, RequestClaim
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.messages import blob_message
from tests.journals import FolderJournal
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    SPEC,
    NoEvaluators,
    WholeShell,
    connect_node,
    driving,
    prepared_job,
    services_in,
)

DRIVEN_JOB = JobId("job-000000000001")
NOW = Milliseconds(0)
CREATED = JobCreated(at_ms=NOW, job_id=DRIVEN_JOB, spec=JobSpec(workload="digits-softmax"))


class RecordedDriver:
    """A driver with a record of what it did."""

    def __init__(self, folder: Path) -> None:
        self.journal = FolderJournal(folder)
        self.driver = Driver(self.journal, KINDS)
        self.performed: list[tuple[Command, int]] = []
        self.drains: list[Decision] = []

    def perform(self, runtime: JobRuntime, command: Command) -> None:
        """Note a command and how much was durable by then."""
        self.performed.append((command, len(self.journal.read(runtime.job.job_id).entries)))


@pytest.fixture
async def driver_record(tmp_path: Path) -> AsyncIterator[RecordedDriver]:
    driver_record = RecordedDriver(tmp_path)
    driver_task = asyncio.create_task(
        driver_record.driver.run(driver_record.perform, driver_record.drains.append)
    )
    yield driver_record
    driver_record.driver.close()
    await driver_task


async def test_a_command_is_performed_only_after_its_event_is_durable(
    driver_record: RecordedDriver,
) -> None:
    assert await driver_record.driver.submit(DRIVEN_JOB, CREATED) == ""
    assert [(type(command), rows) for command, rows in driver_record.performed] == [
        (InitialiseModel, 1)
    ]


async def test_events_that_arrive_together_are_one_transaction(
    driver_record: RecordedDriver,
) -> None:
    await asyncio.gather(
        driver_record.driver.submit(DRIVEN_JOB, CREATED),
        driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW)),
    )
    assert len(driver_record.drains) == 1
    assert driver_record.driver.runtimes[DRIVEN_JOB].job.phase is Phase.PAUSED


async def test_a_refused_event_is_answered_and_not_journalled(
    driver_record: RecordedDriver,
) -> None:
    assert "there is no job" in await driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW))
    await driver_record.driver.submit(DRIVEN_JOB, CREATED)
    await driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW))

    assert "is paused" in await driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW))
    assert len(driver_record.journal.read(DRIVEN_JOB).entries) == 2


async def test_a_full_disk_changes_nothing_and_is_told(driver_record: RecordedDriver) -> None:
    await driver_record.driver.submit(DRIVEN_JOB, CREATED)
    driver_record.journal.is_full = True
    with pytest.raises(HyperGPUError, match="no space"):
        await driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW))
    assert driver_record.driver.runtimes[DRIVEN_JOB].job.phase is Phase.PREPARING

    driver_record.journal.is_full = False
    assert await driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW)) == ""


async def test_a_replay_gives_the_state_that_was_left(driver_record: RecordedDriver) -> None:
    await driver_record.driver.submit(DRIVEN_JOB, CREATED)
    await driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW))

    before, after = (
        driver_record.driver.runtimes[DRIVEN_JOB],
        replay_jobs(driver_record.journal, KINDS).runtimes[DRIVEN_JOB],
    )
    assert (after.job, after.next_sequence) == (before.job, before.next_sequence)
    assert 0 <= after.now_ms() - driver_record.journal.read(DRIVEN_JOB).entries[-1].at_ms < 100_000


async def test_a_request_is_claimed_with_the_event_it_caused(driver_record: RecordedDriver) -> None:
    claim = RequestClaim("a request", DRIVEN_JOB, Digest("0" * 64))
    await driver_record.driver.submit(DRIVEN_JOB, CREATED, claim)
    assert driver_record.journal.request("a request") == claim


async def test_a_job_removed_while_its_events_are_written_stays_removed(
    driver_record: RecordedDriver,
) -> None:
    await driver_record.driver.submit(DRIVEN_JOB, CREATED)
    verdict = driver_record.driver.submit(DRIVEN_JOB, JobPaused(at_ms=NOW))
    del driver_record.driver.runtimes[DRIVEN_JOB]

    await verdict
    assert DRIVEN_JOB not in driver_record.driver.runtimes


async def test_what_arrived_just_before_the_end_is_written_and_the_driver_ends(
    tmp_path: Path,
) -> None:
    driver_record = RecordedDriver(tmp_path)
    driver_task = asyncio.create_task(
        driver_record.driver.run(driver_record.perform, driver_record.drains.append)
    )
    await asyncio.sleep(0)
    verdict = driver_record.driver.submit(DRIVEN_JOB, CREATED)
    driver_record.driver.close()

    async with asyncio.timeout(240):
        await driver_task
    assert verdict.result() == ""


OTHER = JobId("job-000000000002")


class RefusingEvaluator(NoEvaluators):
    """Has no torch."""

    async def initialise(self, job: EvaluatorJob, request: Initialise) -> Initialised:
        raise HyperGPUError(Reason.TORCH_MISSING, "torch is not installed")


def start_again(folder: Path, journal: FolderJournal, evaluator: NoEvaluators) -> WholeShell:
    """A coordinator that has just replayed its journal."""
    blobs = BlobStore(folder, Space(folder))
    services = services_in(folder, journal).replace(blobs=blobs, evaluator=evaluator)
    services.driver.take_replay(replay_jobs(journal, KINDS))
    return services


@pytest.mark.parametrize(
    ("evaluator", "reason"),
    [
        (RefusingEvaluator(), "torch is not installed. Fix: install it"),
        (NoEvaluators(("/nowhere/python",)), "No such file"),
    ],
    ids=["refused", "broken"],
)
async def test_a_job_whose_layout_cannot_be_had_is_paused_with_the_reason(
    evaluator: NoEvaluators, reason: str, tmp_path: Path
) -> None:
    journal = FolderJournal(tmp_path)
    before = services_in(tmp_path, journal)
    async with driving(before):
        await prepared_job(before)
    services = start_again(tmp_path, journal, evaluator)
    runtime = services.jobs[JOB]
    async with driving(services):
        await services.performing.take_up(runtime)

    assert runtime.job.phase is Phase.PAUSED
    assert reason in runtime.job.reason
    assert runtime.is_given_up
    assert not runtime.is_recovering


async def test_a_job_that_another_version_wrote_rests_and_the_others_go_on(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path)
    before = services_in(tmp_path, journal)
    async with driving(before):
        await prepared_job(before)
    journal.append([Entry(OTHER, 0, 0, "Sorcery", b'{"kind":"Sorcery","at_ms":0}')])

    replay = replay_jobs(journal, KINDS)
    assert list(replay.runtimes) == [JOB]
    assert "Sorcery" in replay.unreadable[OTHER]
    assert not start_again(tmp_path, journal, RefusingEvaluator()).needs.are_complete()


async def job_with_data(folder: Path, journal: FolderJournal) -> tuple[BlobRef, BlobRef]:
    """Journal a job with data of its user's; gives its manifest and its one file."""
    blobs = BlobStore(folder, Space(folder))
    file = blobs.put(b"a user's file", keep_s=-1)
    entry = tensor_pb2.ManifestEntry(path="a.txt", blob=blob_message(file))
    manifest_bytes = packed_manifest(tensor_pb2.Manifest(entries=[entry]))
    manifest = blobs.put(manifest_bytes, keep_s=-1)
    services = services_in(folder, journal)
    async with driving(services):
        creation = JobCreated(at_ms=Milliseconds(0), job_id=JOB, spec=SPEC, manifest=manifest)
        await services.driver.submit(JOB, creation)
    return manifest, file


async def test_a_users_files_outlive_a_collection_before_their_manifest_is_read(
    tmp_path: Path,
) -> None:
    journal = FolderJournal(tmp_path)
    _, file = await job_with_data(tmp_path, journal)
    services = start_again(tmp_path, journal, RefusingEvaluator())
    await collect(services.storage, services.needs)
    assert services.blobs.size(file.digest) == file.size_bytes

    async with driving(services):
        await services.performing.take_up(services.jobs[JOB])
        assert services.needs.are_complete()
        await collect(services.storage, services.needs)
        assert services.blobs.size(file.digest) == file.size_bytes
        services.driver.runtimes.pop(JOB).close()
        await collect(services.storage, services.needs)
    assert services.blobs.size(file.digest) is None


async def test_a_users_files_outlive_the_damage_of_their_manifest(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path)
    manifest, file = await job_with_data(tmp_path, journal)
    (tmp_path / "blobs" / manifest.digest[:2] / manifest.digest).write_bytes(b"damaged")
    services = start_again(tmp_path, journal, RefusingEvaluator())
    fresh = services.blobs.put(b"of a round that is over", keep_s=-1)
    async with driving(services):
        await services.performing.take_up(services.jobs[JOB])
        await collect(services.storage, services.needs)
        services.jobs[JOB].close()

    assert services.blobs.size(file.digest) == file.size_bytes
    assert services.blobs.size(fresh.digest) is None


CONTENT = bytes(range(200))
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
OWNER = upload_owner(JOB, NODE)


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
    await store_node_counts(services.driver, services.nodes)
    services.nodes.count(NODE, accepted=1, rejected=1)
    assert services.nodes.unstored_counts(NODE) == (3, 1)

    journal.is_full = False
    await store_node_counts(services.driver, services.nodes)
    (stored_node,) = journal.nodes()
    assert (stored_node.updates_accepted, stored_node.updates_rejected) == (3, 1)
    assert services.nodes.unstored_counts(NODE) == (0, 0)


async def test_an_upload_is_thrown_away_once_its_lease_has_ended(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    uploads = ObservedUploads(tmp_path, services.blobs, Space(tmp_path, 0))
    uploads.forgotten, uploads.loop = asyncio.Queue(), asyncio.get_running_loop()
    services = services.replace(uploads=uploads)
    collector = BlobCollector(services.storage, services.needs)
    collect_task = asyncio.create_task(collector.run())
    async with driving(services), asyncio.timeout(240):
        await prepared_job(services)
        assert not await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE))
        upload = uploads.open(upload_name("update", owner=OWNER), BLOB)
        collector.request()
        assert await uploads.forgotten.get() == 0

        assert not await services.driver.submit(JOB, NodeLost(at_ms=NOW, node=NODE, reason="cable"))
        collector.request()
        assert await uploads.forgotten.get() == 1
    assert not (tmp_path / QUARANTINE / upload.name).exists()
    collect_task.cancel()


class SlowJournal(FolderJournal):
    """Writes events of one kind only when it is told to."""

    def __init__(self, folder: Path, kind: type[Event]) -> None:
        super().__init__(folder)
        self._kind = kind.__name__
        self.is_writing = threading.Event()
        self.may_write = threading.Event()

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        if any(entry.kind == self._kind for entry in entries):
            self.is_writing.set()
            assert self.may_write.wait(240)
        super().append(entries, claims)


@pytest.mark.parametrize("departure", ["lose", "drain"])
async def test_a_node_lost_or_drained_while_its_join_is_written_leaves_its_job(
    tmp_path: Path, departure: str
) -> None:
    journal = SlowJournal(tmp_path, NodeJoined)
    services = services_in(tmp_path, journal)
    allocator = services.allocator
    async with driving(services), asyncio.timeout(240):
        runtime = await prepared_job(services)
        connect_node(services)
        allocate_task = asyncio.create_task(allocator.run())
        allocator.review()
        await asyncio.to_thread(journal.is_writing.wait)
        await getattr(allocator, departure)(NODE, "maintenance")
        journal.may_write.set()
        while not (member := runtime.job.members.get(NODE)) or (
            member.is_present and not member.is_leaving
        ):
            await runtime.change().wait()
        assert member.is_present == (departure == "drain")
        allocate_task.cancel()


async def test_a_node_that_is_back_while_another_is_given_up_keeps_its_stream(
    tmp_path: Path,
) -> None:
    other, journal = NodeId("0x" + "b2" * 20), SlowJournal(tmp_path, NodeLost)
    services = services_in(tmp_path, journal)
    async with driving(services), asyncio.timeout(240):
        runtime = await prepared_job(services)
        await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE))
        services.nodes.expect([NODE, other], Milliseconds(-20_000))
        loss_task = asyncio.create_task(services.allocator.lose_overdue(Milliseconds(15_000)))
        await asyncio.to_thread(journal.is_writing.wait)
        back = connect_node(services, other)
        journal.may_write.set()
        await loss_task
    assert not runtime.job.members[NODE].is_present
    assert services.nodes.streams == {other: back}


async def test_a_job_with_a_model_is_lent_nodes_of_its_own_workloads_version(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    async with driving(services), asyncio.timeout(240):
        runtime = await prepared_job(services)
        runtime.workload_version += 1
        connect_node(services)
        allocate_task = asyncio.create_task(services.allocator.run())
        services.allocator.review()
        while NODE not in runtime.job.members:
            await runtime.change().wait()
        allocate_task.cancel()


async def test_nodes_are_not_dealt_out_afresh_for_what_happens_within_a_round(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    join_event = NodeJoined(at_ms=NOW, node=NODE)
    rejection = UpdateRejected(at_ms=NOW, node=NODE, round=0, reason="late")
    async with driving(services):
        runtime = await prepared_job(services)

        def moves_nodes(event: Event) -> bool:
            verdict = asyncio.get_running_loop().create_future()
            return decide({JOB: runtime}, [SubmittedEvent(JOB, event, verdict)], KINDS).moves_nodes

        assert moves_nodes(join_event)
        await services.driver.submit(JOB, join_event)
        assert not moves_nodes(rejection)
        assert moves_nodes(JobPaused(at_ms=NOW))
