import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.job.events import JobStopped
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.commands.evaluation import failed_judgement
from coordinator.shell.journal.records import Entry
from coordinator.shell.runtime.persistence import replay_jobs
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.user.job import JobServicer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds
from hypergpu.v1 import job_pb2
from tests.journals import FolderJournal
from tests.unit.shell.servicers.paid_rounds import stop_before_judgement
from tests.unit.shell.whole_shell import JOB, driving, payments_of, prepared_job, services_in

NOBODY: Any = None
"""Who calls makes no difference to these methods."""
OTHER = JobId("job-000000000002")


def with_unreadable_job(folder: Path) -> Services:
    """A coordinator that started on a journal which a newer version wrote to."""
    journal = FolderJournal(folder)
    journal.append([Entry(OTHER, 0, 0, "Sorcery", b'{"kind":"Sorcery","at_ms":0}')])
    services = services_in(folder, journal)
    services.driver.unreadable.update(replay_jobs(journal).unreadable)
    return services


def forgotten_blob(blobs: BlobStore) -> int:
    """A blob that no job which can be read needs."""
    return blobs.put(b"what the other version keeps", keep_s=-1).size_bytes


async def remove(services: Services, job_id: JobId) -> int:
    request = job_pb2.RemoveJobRequest(job_id=job_id)
    return (await JobServicer(services).remove_job(request, NOBODY)).freed_bytes


async def test_a_job_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    services = with_unreadable_job(tmp_path)
    async with driving(services):
        await prepared_job(services)
        listed = await JobServicer(services).list_jobs(job_pb2.ListJobsRequest(), NOBODY)
    assert [(job.job_id, job.phase) for job in listed.jobs] == [
        (OTHER, "unreadable"),
        (JOB, "waiting"),
    ]
    assert "Sorcery" in listed.jobs[0].reason


async def test_a_job_that_cannot_be_read_names_its_removal_as_a_fix(tmp_path: Path) -> None:
    services = with_unreadable_job(tmp_path)
    with pytest.raises(HyperGPUError, match="remove the job: hypergpu job rm"):
        await JobServicer(services).get_job(job_pb2.GetJobRequest(job_id=OTHER), NOBODY)


async def test_a_job_that_cannot_be_read_is_removed_with_all_that_only_it_may_need(
    tmp_path: Path,
) -> None:
    services = with_unreadable_job(tmp_path)
    size_bytes = forgotten_blob(services.blobs)
    (services.datasets_dir / ("d" * 64)).mkdir(parents=True)
    services.job_dir(OTHER).mkdir(parents=True)
    async with driving(services):
        assert await remove(services, OTHER) == size_bytes

    assert services.journal.jobs() == ()
    assert not services.driver.unreadable
    assert not services.job_dir(OTHER).exists()
    assert list(services.datasets_dir.iterdir()) == []


async def test_data_that_a_job_which_cannot_be_read_may_need_outlives_a_removal(
    tmp_path: Path,
) -> None:
    services = with_unreadable_job(tmp_path)
    (services.datasets_dir / ("d" * 64)).mkdir(parents=True)
    async with driving(services):
        await prepared_job(services)
        await services.driver.submit(JOB, JobStopped(at_ms=Milliseconds(0)))
        await remove(services, JOB)

    assert services.journal.jobs() == (OTHER,)
    assert len(list(services.datasets_dir.iterdir())) == 1


async def test_a_job_is_measured_and_receipted_before_its_rows_go(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await stop_before_judgement(services)
        (waiting,) = services.driver.runtimes[JOB].job.unmeasured

        await remove(services, JOB)
        assert await services.driver.submit(JOB, failed_judgement(waiting.number, "late")) != ""

    ((job_id, kinds),) = payments_of(services).caught_up
    assert (job_id, kinds.count("RoundMeasured"), kinds[-1]) == (JOB, 2, "JobEnded")
    assert services.journal.jobs() == ()


async def test_a_job_that_goes_on_is_not_removed(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await prepared_job(services)
        with pytest.raises(HyperGPUError, match="stop it first") as refused:
            await remove(services, JOB)
    assert refused.value.reason is Reason.JOB_PHASE
    assert services.journal.jobs() == (JOB,)


async def test_a_removal_that_is_asked_for_twice_is_done_once(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await stop_before_judgement(services)
        first, second = await asyncio.gather(
            remove(services, JOB), remove(services, JOB), return_exceptions=True
        )
    assert isinstance(first, int)
    assert isinstance(second, HyperGPUError)
    assert second.reason is Reason.JOB_UNKNOWN
