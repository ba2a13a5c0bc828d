import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.core.job.commands import Aggregate, FoldedUpdate
from coordinator.core.job.events import Event
from coordinator.core.job.state import Job, Model
from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.commands.aggregation import aggregate, fold_updates
from coordinator.shell.runtime.driver import Driver
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.tensors.codec import encode_update, update_bytes
from tests.journals import FolderJournal
from tests.unit.aggregation.fold_files import LAYOUT, random_flat
from tests.unit.shell.whole_shell import JOB, NODE, SPEC, services_in


class NotedBlobs(BlobStore):
    """Notes what is made durable."""

    def __init__(self, folder: Path, space: Space, notes: list[str]) -> None:
        super().__init__(folder, space)
        self._notes = notes

    def sync(self, digest: Digest) -> None:
        self._notes.append(digest)
        super().sync(digest)


class NotingDriver(Driver):
    """Notes what is about to be journalled, and accepts all of it."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        super().__init__(FolderJournal(folder))
        self._notes = notes

    async def insist(self, job_id: JobId, event: Event) -> str:
        self._notes.append(type(event).__name__)
        return ""


def closed_round(services: Services) -> Aggregate:
    """A round with one update, on the first model."""
    base = services.blobs.put(b"".join(part.tobytes() for part in random_flat(0)), keep_s=-1)
    payload = encode_update(LAYOUT, SPEC.codec.up, random_flat(1, 0.01)).payload.tobytes()
    update = services.blobs.put(payload, keep_s=-1)
    term = FoldedUpdate(NODE, Slot(0), update, 10, SPEC.codec.up)
    codec = SPEC.codec
    return Aggregate(0, Model(0, base), (term,), SPEC, down=codec.down, is_sparse=False)


def test_a_fold_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    space = Space(tmp_path, 2 * LAYOUT.model_bytes + 20_000)
    services = services_in(tmp_path)._replace(blobs=BlobStore(tmp_path, space))
    command = closed_round(services)
    work = services.blobs.work_path("any").parent

    with pytest.raises(HyperGPUError, match="DISK_FULL"):
        fold_updates(services, LAYOUT, command)
    assert list(work.iterdir()) == []
    assert services.pins.all() == frozenset()


async def test_a_model_is_durable_before_one_made_of_it_is_journalled(tmp_path: Path) -> None:
    notes: list[str] = []
    blobs = NotedBlobs(tmp_path, Space(tmp_path), notes)
    services = services_in(tmp_path)._replace(
        blobs=blobs, driver=NotingDriver(tmp_path / "noted", notes)
    )
    runtime = JobRuntime(Job(JOB, SPEC), 0)
    runtime.layout = LAYOUT
    command = closed_round(services)

    await aggregate(services, runtime, command)
    assert notes[:2] == [command.base.blob.digest, "AggregateReady"]
    assert len(notes) == 5
    assert services.pins.all() == frozenset()


def test_a_fold_takes_each_update_in_its_own_scheme_and_writes_the_planned_delta(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)._replace(blobs=BlobStore(tmp_path, Space(tmp_path)))
    command = closed_round(services)
    payload = encode_update(LAYOUT, "topk64", random_flat(2, 0.01)).payload.tobytes()
    sparse = services.blobs.put(payload, keep_s=-1)
    term = FoldedUpdate(NODE, Slot(1), sparse, 30, "topk64")
    command = replace(command, updates=(*command.updates, term), down="int8")

    event = fold_updates(services, LAYOUT, command).event
    assert event.omitted == ()
    assert event.agreement is not None
    (delta,) = event.model.deltas
    assert (delta.scheme, delta.blob.size_bytes) == ("int8", update_bytes(LAYOUT, "int8"))


async def test_a_fold_that_nobody_waits_for_leaves_no_pins(tmp_path: Path) -> None:
    services = services_in(tmp_path)._replace(blobs=BlobStore(tmp_path, Space(tmp_path)))
    runtime = JobRuntime(Job(JOB, SPEC), 0)
    runtime.layout = LAYOUT
    folding = asyncio.create_task(aggregate(services, runtime, closed_round(services)))
    await asyncio.sleep(0)
    folding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await folding
    await asyncio.get_running_loop().shutdown_default_executor()
    for _ in range(5):  # The thread has ended; the loop hears of it.
        await asyncio.sleep(0)
    assert services.pins.all() == frozenset()
