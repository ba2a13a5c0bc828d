"""Creation of jobs that begin with another's model, and take its data over."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.core.training.job.events import JobCreated, ModelInitialised
from coordinator.core.training.job.state import Model
from coordinator.shell.driver.replay import replay_jobs
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.service.calls import Caller
from coordinator.shell.store.journal.records import TokenRecord
from coordinator.shell.translate import Capabilities
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, TokenId
from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.spec import Data, JobSpec, TrainingSettings
from hypergpu.units import Milliseconds, Samples
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.credentials import Role
from hypergpu.wire.messages import blob_message
from hypergpu.workloads.registry import find
from tests.journals import close_journals
from tests.unit.shell.test_job_services import Context
from tests.unit.shell.whole_shell import NODE, WholeShell, driving, services_in

SPEC = JobSpec("text-gpt", data=Data(path="texts"))
SOURCE = JobId("job-00000000000a")
OWNER = TokenId("owner")


class OtherCaller(Caller):
    """A user who may see every job, and change their own."""

    def may_change(self, owner: TokenId) -> bool:
        return owner != OWNER


def request(spec: JobSpec = SPEC) -> job_pb2.CreateJobRequest:
    """Go on from the source, with the data that it has."""
    return job_pb2.CreateJobRequest(
        request_id="again", spec_json=spec_json(spec), weights_job=SOURCE
    )


async def begin_source(
    services: WholeShell, spec: JobSpec = SPEC, workload_version: int = 1
) -> tuple[JobRuntime, BlobRef]:
    """A job with data and a first model; and its file of data."""
    file = services.blobs.put(b"texts", keep_s=-1)
    entries = [tensor_pb2.ManifestEntry(path="a.txt", blob=blob_message(file))]
    manifest = services.blobs.put(tensor_pb2.Manifest(entries=entries).SerializeToString())
    creation = JobCreated(
        at_ms=Milliseconds(0), job_id=SOURCE, spec=spec, manifest=manifest, owner=OWNER
    )
    assert await services.driver.submit(SOURCE, creation) == ""
    initialisation = ModelInitialised(
        at_ms=Milliseconds(0),
        model=Model(0, services.blobs.put(b"first", keep_s=-1)),
        partition_sizes=(Samples(9),),
        workload_version=workload_version,
    )
    assert await services.driver.submit(SOURCE, initialisation) == ""
    return services.jobs[SOURCE], file


async def test_a_request_that_is_sent_again_is_one_job_also_where_the_source_went_on(
    tmp_path: Path,
) -> None:
    services, caller = services_in(tmp_path), Caller(Context(), "CreateJob")
    async with driving(services):
        source, file = await begin_source(services)
        servicer = services.job_servicer()
        answer = await servicer.create_job(request(), caller)
        later = services.blobs.put(b"later", keep_s=-1)
        source.job = replace(source.job, model=Model(1, later))
        again = await servicer.create_job(request(), caller)
        runtime = services.jobs[JobId(answer.job_id)]
    assert again.job_id == answer.job_id
    assert runtime.job.manifest == source.job.manifest
    assert runtime.entries_of_manifest == frozenset([file.digest])


async def test_data_and_models_are_taken_over_by_their_owner_alone(tmp_path: Path) -> None:
    services, caller = services_in(tmp_path), OtherCaller(Context(), "CreateJob")
    async with driving(services):
        await begin_source(services)
        for spec in (SPEC, JobSpec("digits-softmax")):
            with pytest.raises(HyperGPUError, match="belongs to token owner") as failure:
                await services.job_servicer().create_job(request(spec), caller)
            assert failure.value.reason is Reason.ROLE_FORBIDDEN


def user(token: str) -> Caller:
    caller = Caller(Context(), "CreateJob")
    caller.token = TokenRecord(TokenId(token), Role.USER, "", b"", 0, 0, None)
    return caller


async def test_nobody_names_a_file_that_only_others_have_sent(tmp_path: Path) -> None:
    services, owner, other = services_in(tmp_path), user(OWNER), user("other")
    async with driving(services):
        source, file = await begin_source(services)
        source.entries_of_manifest = frozenset([file.digest])
        servicer = services.job_servicer()
        assert source.job.manifest is not None
        assert source.job.model is not None
        sent_blobs = (file, source.job.manifest, source.job.model.blob)
        for number, blob in enumerate(sent_blobs):
            entry = tensor_pb2.ManifestEntry(path="a", blob=blob_message(blob))
            data_request = job_pb2.CreateJobRequest(
                request_id=f"data-{number}",
                spec_json=spec_json(SPEC),
                manifest=tensor_pb2.Manifest(entries=[entry]),
            )
            weights = job_pb2.CreateJobRequest(
                request_id=f"weights-{number}",
                spec_json=spec_json(SPEC),
                weights_file=blob_message(blob),
            )
            for stolen_request in (data_request, weights):
                with pytest.raises(HyperGPUError, match="not this token's") as failure:
                    await servicer.create_job(stolen_request, other)
                assert failure.value.reason is Reason.BLOB_UNKNOWN
            offer = job_pb2.OfferDataRequest(blob=blob_message(blob))
            assert not (await servicer.offer_data(offer, other)).is_stored
        offer = job_pb2.OfferDataRequest(blob=blob_message(file))
        assert (await servicer.offer_data(offer, owner)).is_stored


@pytest.mark.parametrize(
    "workload", ["text-gpt", "hf-causal-lm", "imagefolder-resnet18", "hf-image-classifier"]
)
async def test_a_job_of_an_older_workload_version_waits_and_goes_on_as_a_new_job(
    tmp_path: Path, workload: str
) -> None:
    version = find(workload).version
    spec = JobSpec(workload, data=Data(path="data"), training=TrainingSettings(nodes=1))
    before = services_in(tmp_path)
    async with driving(before):
        await begin_source(before, spec, version - 1)
    close_journals()
    services = services_in(tmp_path)
    replay = replay_jobs(services.journal, KINDS)
    assert not replay.unreadable
    services.driver.take_replay(replay)
    source = replay.runtimes[SOURCE]
    source.is_recovering = False
    able = Capabilities(workloads={workload: version})
    services.nodes.connect(ControlStream(NODE, able, "test"))
    async with driving(services), asyncio.timeout(240):
        allocate_task = asyncio.create_task(services.allocator.run())
        caller = Caller(Context(), "CreateJob")
        answer = await services.job_servicer().create_job(request(spec), caller)
        new_runtime = services.jobs[JobId(answer.job_id)]
        assert source.job.model is not None
        first = ModelInitialised(
            at_ms=Milliseconds(0),
            model=source.job.model,
            partition_sizes=(Samples(9),),
            workload_version=version,
        )
        assert await services.driver.submit(new_runtime.job.job_id, first) == ""
        services.allocator.review()
        while NODE not in new_runtime.job.members:
            await new_runtime.change().wait()
        allocate_task.cancel()
    assert new_runtime.job.weights is not None
    assert new_runtime.job.weights.blob == source.job.model.blob
    assert source.job.workload_version == version - 1
    assert not source.job.members
