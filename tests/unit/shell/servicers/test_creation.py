import asyncio
from pathlib import Path

import pytest

from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.runtime.maintenance import collect
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.user.job import JobServicer
from coordinator.shell.servicers.wire.handlers import Caller
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId
from hypergpu.jobfile import spec_json
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.assignment import blob_message
from tests.unit.shell.whole_shell import SPEC, driving, payments_of, services_in


class Context:
    """A call without a transport."""

    def peer(self) -> str:
        return "test"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {}


CALLER = Caller(Context(), "CreateJob")


class CollectingBlobs(BlobStore):
    """Looks at a size, and then a collection runs that began just before."""

    services: Services

    def size(self, digest: Digest) -> Bytes | None:
        found = super().size(digest)
        self.collect(self.services.needed_blobs())
        return found


def request(*files: BlobRef) -> job_pb2.CreateJobRequest:
    """A job with data."""
    entries = [
        tensor_pb2.ManifestEntry(path=str(number), blob=blob_message(file))
        for number, file in enumerate(files)
    ]
    manifest = tensor_pb2.Manifest(entries=entries)
    return job_pb2.CreateJobRequest(request_id="one", spec_json=spec_json(SPEC), manifest=manifest)


async def test_a_users_files_outlive_a_collection_while_their_job_is_created(
    tmp_path: Path,
) -> None:
    blobs = CollectingBlobs(tmp_path, Space(tmp_path))
    services = blobs.services = services_in(tmp_path)._replace(blobs=blobs)
    file = blobs.put(b"a user's file", keep_s=-1)
    async with driving(services):
        await JobServicer(services).create_job(request(file), CALLER)
        assert services.pins.all() == frozenset()
        await collect(services)
    assert blobs.size(file.digest) == file.size_bytes


async def test_a_job_that_lacks_a_file_leaves_no_pins(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    file = services.blobs.put(b"a user's file")
    absent = BlobRef(Digest("0" * 64), Bytes(1))
    async with driving(services):
        with pytest.raises(HyperGPUError, match="1 of 2 files is missing, such as 1"):
            await JobServicer(services).create_job(request(file, absent), CALLER)
    assert services.pins.all() == frozenset()


async def test_a_caller_who_goes_away_leaves_no_job_half_created(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    file = services.blobs.put(b"a user's file")
    servicer = JobServicer(services)
    async with driving(services):
        creating = asyncio.create_task(servicer.create_job(request(file), CALLER))
        await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        again = await servicer.create_job(request(file), CALLER)

    assert list(services.driver.runtimes) == [again.job_id]
    assert services.driver.runtimes[JobId(again.job_id)].entries_of_manifest == frozenset(
        [file.digest]
    )
    assert services.pins.all() == frozenset()


async def test_a_job_whose_ledger_is_not_known_is_not_created_and_may_be_sent_again(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    file = services.blobs.put(b"a user's file")

    payments = payments_of(services)
    payments.refusal = HyperGPUError(Reason.CHAIN_UNREACHABLE, "none is known yet")
    async with driving(services):
        with pytest.raises(HyperGPUError, match="none is known yet"):
            await JobServicer(services).create_job(request(file), CALLER)
        assert services.driver.runtimes == {}
        assert services.pins.all() == frozenset()
        payments.refusal = None
        again = await JobServicer(services).create_job(request(file), CALLER)
    assert list(services.driver.runtimes) == [again.job_id]
