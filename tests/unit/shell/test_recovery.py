from pathlib import Path

import pytest

from coordinator.core.job.events import JobCreated
from coordinator.core.job.state import Phase
from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.commands.datasets import packed_manifest
from coordinator.shell.commands.recovery import take_up
from coordinator.shell.evaluator.messages import Initialise, Initialised
from coordinator.shell.evaluator.process import EvaluatorProcess
from coordinator.shell.journal.records import Entry
from coordinator.shell.runtime.maintenance import collect
from coordinator.shell.runtime.persistence import replay_jobs
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.assignment import blob_message
from tests.journals import FolderJournal
from tests.unit.shell.whole_shell import JOB, SPEC, driving, prepared_job, services_in

OTHER = JobId("job-000000000002")


class RefusingEvaluator(EvaluatorProcess):
    """Has no torch."""

    async def initialise(self, request: Initialise) -> Initialised:
        raise HyperGPUError(Reason.TORCH_MISSING, "torch is not installed")


def start_again(folder: Path, journal: FolderJournal, evaluator: EvaluatorProcess) -> Services:
    """A coordinator that has just replayed its journal."""
    blobs = BlobStore(folder, Space(folder))
    services = services_in(folder, journal)._replace(blobs=blobs, evaluator=evaluator)
    replay = replay_jobs(journal)
    services.driver.runtimes.update(replay.runtimes)
    services.driver.unreadable.update(replay.unreadable)
    return services


@pytest.mark.parametrize(
    ("evaluator", "reason"),
    [
        (RefusingEvaluator(), "torch is not installed. Fix: install it"),
        (EvaluatorProcess(("/nowhere/python",)), "No such file"),
    ],
    ids=["refused", "broken"],
)
async def test_a_job_whose_layout_cannot_be_had_is_paused_with_the_reason(
    evaluator: EvaluatorProcess, reason: str, tmp_path: Path
) -> None:
    journal = FolderJournal(tmp_path)
    before = services_in(tmp_path, journal)
    async with driving(before):
        await prepared_job(before)
    services = start_again(tmp_path, journal, evaluator)
    runtime = services.driver.runtimes[JOB]
    async with driving(services):
        await take_up(services, runtime)

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

    replay = replay_jobs(journal)
    assert list(replay.runtimes) == [JOB]
    assert "Sorcery" in replay.unreadable[OTHER]
    assert not start_again(tmp_path, journal, RefusingEvaluator()).knows_needed_blobs()


async def job_with_data(folder: Path, journal: FolderJournal) -> tuple[BlobRef, BlobRef]:
    """Journal a job with data of its user's; gives its manifest and its one file."""
    blobs = BlobStore(folder, Space(folder))
    file = blobs.put(b"a user's file", keep_s=-1)
    entry = tensor_pb2.ManifestEntry(path="a.txt", blob=blob_message(file))
    packed = packed_manifest(tensor_pb2.Manifest(entries=[entry]))
    manifest = blobs.put(packed, keep_s=-1)
    services = services_in(folder, journal)
    async with driving(services):
        created = JobCreated(at_ms=Milliseconds(0), job_id=JOB, spec=SPEC, manifest=manifest)
        await services.driver.submit(JOB, created)
    return manifest, file


async def test_a_users_files_outlive_a_collection_before_their_manifest_is_read(
    tmp_path: Path,
) -> None:
    journal = FolderJournal(tmp_path)
    _, file = await job_with_data(tmp_path, journal)
    services = start_again(tmp_path, journal, RefusingEvaluator())
    await collect(services)
    assert services.blobs.size(file.digest) == file.size_bytes

    async with driving(services):
        await take_up(services, services.driver.runtimes[JOB])
        assert services.knows_needed_blobs()
        await collect(services)
        assert services.blobs.size(file.digest) == file.size_bytes
        services.driver.runtimes.pop(JOB).close()
        await collect(services)
    assert services.blobs.size(file.digest) is None


async def test_a_users_files_outlive_the_damage_of_their_manifest(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path)
    manifest, file = await job_with_data(tmp_path, journal)
    (tmp_path / "blobs" / manifest.digest[:2] / manifest.digest).write_bytes(b"damaged")
    services = start_again(tmp_path, journal, RefusingEvaluator())
    fresh = services.blobs.put(b"of a round that is over", keep_s=-1)
    async with driving(services):
        await take_up(services, services.driver.runtimes[JOB])
        await collect(services)
        services.driver.runtimes[JOB].close()

    assert services.blobs.size(file.digest) == file.size_bytes
    assert services.blobs.size(fresh.digest) is None
