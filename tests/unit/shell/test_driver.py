import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.core.job.commands import Command, InitialiseModel
from coordinator.core.job.events import JobCreated, JobPaused
from coordinator.core.job.state import Phase
from coordinator.shell.journal.records import RequestClaim
from coordinator.shell.runtime.driver import Decision, Driver
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.persistence import replay_jobs
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Milliseconds
from tests.journals import FolderJournal

JOB = JobId("job-000000000001")
NOW = Milliseconds(0)
CREATED = JobCreated(at_ms=NOW, job_id=JOB, spec=JobSpec(workload="digits-softmax"))


class RecordedDriver:
    """A driver with a record of what it did."""

    def __init__(self, folder: Path) -> None:
        self.journal = FolderJournal(folder)
        self.driver = Driver(self.journal)
        self.performed: list[tuple[Command, int]] = []
        self.drains: list[Decision] = []

    def perform(self, runtime: JobRuntime, command: Command) -> None:
        """Note a command and how much was durable by then."""
        self.performed.append((command, len(self.journal.read(runtime.job.job_id).entries)))


@pytest.fixture
async def driver_record(tmp_path: Path) -> AsyncIterator[RecordedDriver]:
    driver_record = RecordedDriver(tmp_path)
    running = asyncio.create_task(
        driver_record.driver.run(driver_record.perform, driver_record.drains.append)
    )
    yield driver_record
    driver_record.driver.close()
    await running


async def test_a_command_is_performed_only_after_its_event_is_durable(
    driver_record: RecordedDriver,
) -> None:
    assert await driver_record.driver.submit(JOB, CREATED) == ""
    assert [(type(command), rows) for command, rows in driver_record.performed] == [
        (InitialiseModel, 1)
    ]


async def test_events_that_arrive_together_are_one_transaction(
    driver_record: RecordedDriver,
) -> None:
    await asyncio.gather(
        driver_record.driver.submit(JOB, CREATED),
        driver_record.driver.submit(JOB, JobPaused(at_ms=NOW)),
    )
    assert len(driver_record.drains) == 1
    assert driver_record.driver.runtimes[JOB].job.phase is Phase.PAUSED


async def test_a_refused_event_is_answered_and_not_journalled(
    driver_record: RecordedDriver,
) -> None:
    assert "there is no job" in await driver_record.driver.submit(JOB, JobPaused(at_ms=NOW))
    await driver_record.driver.submit(JOB, CREATED)
    await driver_record.driver.submit(JOB, JobPaused(at_ms=NOW))

    assert "is paused" in await driver_record.driver.submit(JOB, JobPaused(at_ms=NOW))
    assert len(driver_record.journal.read(JOB).entries) == 2


async def test_a_full_disk_changes_nothing_and_is_told(driver_record: RecordedDriver) -> None:
    await driver_record.driver.submit(JOB, CREATED)
    driver_record.journal.is_full = True
    with pytest.raises(HyperGPUError, match="no space"):
        await driver_record.driver.submit(JOB, JobPaused(at_ms=NOW))
    assert driver_record.driver.runtimes[JOB].job.phase is Phase.PREPARING

    driver_record.journal.is_full = False
    assert await driver_record.driver.submit(JOB, JobPaused(at_ms=NOW)) == ""


async def test_a_replay_gives_the_state_that_was_left(driver_record: RecordedDriver) -> None:
    await driver_record.driver.submit(JOB, CREATED)
    await driver_record.driver.submit(JOB, JobPaused(at_ms=NOW))

    before, after = (
        driver_record.driver.runtimes[JOB],
        replay_jobs(driver_record.journal).runtimes[JOB],
    )
    assert (after.job, after.next_sequence) == (before.job, before.next_sequence)
    assert 0 <= after.now_ms() - driver_record.journal.read(JOB).entries[-1].at_ms < 100_000


async def test_a_request_is_claimed_with_the_event_it_caused(driver_record: RecordedDriver) -> None:
    claim = RequestClaim("a request", JOB, Digest("0" * 64))
    await driver_record.driver.submit(JOB, CREATED, claim)
    assert driver_record.journal.request("a request") == claim


async def test_a_job_removed_while_its_events_are_written_stays_removed(
    driver_record: RecordedDriver,
) -> None:
    await driver_record.driver.submit(JOB, CREATED)
    verdict = driver_record.driver.submit(JOB, JobPaused(at_ms=NOW))
    del driver_record.driver.runtimes[JOB]

    await verdict
    assert JOB not in driver_record.driver.runtimes


async def test_what_arrived_just_before_the_end_is_written_and_the_driver_ends(
    tmp_path: Path,
) -> None:
    driver_record = RecordedDriver(tmp_path)
    running = asyncio.create_task(
        driver_record.driver.run(driver_record.perform, driver_record.drains.append)
    )
    await asyncio.sleep(0)
    verdict = driver_record.driver.submit(JOB, CREATED)
    driver_record.driver.close()

    async with asyncio.timeout(240):
        await running
    assert verdict.result() == ""
