from pathlib import Path

import pytest

from coordinator.core.events import JobCreated
from coordinator.core.job import BlobRef, Phase
from coordinator.shell.blobs.disk import DiskBlobs
from coordinator.shell.blobs.space import Space
from coordinator.shell.evaluator.messages import Initialise, Initialised
from coordinator.shell.evaluator.process import EvaluatorProcess
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.journal.records import Entry
from coordinator.shell.runtime.acts.datasets import packed_manifest
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.recovery import replay_jobs, take_up
from coordinator.shell.runtime.upkeep import collect
from coordinator.shell.translate import blob_message
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds
from hypergpu.v1 import tensor_pb2
from tests.unit.shell.whole_shell import JOB, SPEC, driving, parts_in, prepared_job

OTHER = JobId("job-000000000002")


class RefusingEvaluator(EvaluatorProcess):
    """Has no torch."""

    async def initialise(self, request: Initialise) -> Initialised:
        raise HyperGPUError(Reason.TORCH_MISSING, "torch is not installed")


def started(folder: Path, journal: MemoryJournal, evaluator: EvaluatorProcess) -> Parts:
    """A coordinator that has just replayed its journal."""
    blobs = DiskBlobs(folder, Space(folder))
    parts = parts_in(folder, journal)._replace(blobs=blobs, evaluator=evaluator)
    replay = replay_jobs(journal)
    parts.driver.rooms.update(replay.rooms)
    parts.driver.unreadable.update(replay.unreadable)
    return parts


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
    journal = MemoryJournal()
    before = parts_in(tmp_path, journal)
    async with driving(before):
        await prepared_job(before)
    parts = started(tmp_path, journal, evaluator)
    room = parts.driver.rooms[JOB]
    async with driving(parts):
        await take_up(parts, room)

    assert room.job.phase is Phase.PAUSED
    assert reason in room.job.reason
    assert room.is_given_up
    assert not room.is_recovering


async def test_a_job_that_another_version_wrote_rests_and_the_others_go_on(tmp_path: Path) -> None:
    journal = MemoryJournal()
    before = parts_in(tmp_path, journal)
    async with driving(before):
        await prepared_job(before)
    journal.append([Entry(OTHER, 0, 0, "Sorcery", b'{"kind":"Sorcery","at_ms":0}')])

    replay = replay_jobs(journal)
    assert list(replay.rooms) == [JOB]
    assert "Sorcery" in replay.unreadable[OTHER]
    assert not started(tmp_path, journal, RefusingEvaluator()).knows_live()


async def job_with_data(folder: Path, journal: MemoryJournal) -> tuple[BlobRef, BlobRef]:
    """Journal a job with data of its user's; gives its manifest and its one file."""
    blobs = DiskBlobs(folder, Space(folder))
    file = blobs.put(b"a user's file", keep_s=-1)
    entry = tensor_pb2.ManifestEntry(path="a.txt", blob=blob_message(file))
    packed = packed_manifest(tensor_pb2.Manifest(entries=[entry]))
    manifest = blobs.put(packed, keep_s=-1)
    parts = parts_in(folder, journal)
    async with driving(parts):
        created = JobCreated(at_ms=Milliseconds(0), job_id=JOB, spec=SPEC, manifest=manifest)
        await parts.driver.submit(JOB, created)
    return manifest, file


async def test_a_users_files_outlive_a_collection_before_their_manifest_is_read(
    tmp_path: Path,
) -> None:
    journal = MemoryJournal()
    _, file = await job_with_data(tmp_path, journal)
    parts = started(tmp_path, journal, RefusingEvaluator())
    await collect(parts)
    assert parts.blobs.size(file.digest) == file.size_bytes

    async with driving(parts):
        await take_up(parts, parts.driver.rooms[JOB])
        assert parts.knows_live()
        await collect(parts)
        assert parts.blobs.size(file.digest) == file.size_bytes
        parts.driver.rooms.pop(JOB).close()
        await collect(parts)
    assert parts.blobs.size(file.digest) is None


async def test_a_users_files_outlive_the_damage_of_their_manifest(tmp_path: Path) -> None:
    journal = MemoryJournal()
    manifest, file = await job_with_data(tmp_path, journal)
    (tmp_path / "blobs" / manifest.digest[:2] / manifest.digest).write_bytes(b"damaged")
    parts = started(tmp_path, journal, RefusingEvaluator())
    fresh = parts.blobs.put(b"of a round that is over", keep_s=-1)
    async with driving(parts):
        await take_up(parts, parts.driver.rooms[JOB])
        await collect(parts)
        parts.driver.rooms[JOB].close()

    assert parts.blobs.size(file.digest) == file.size_bytes
    assert parts.blobs.size(fresh.digest) is None
