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
async def recorded(tmp_path: Path) -> AsyncIterator[RecordedDriver]:
    recorded = RecordedDriver(tmp_path)
    running = asyncio.create_task(recorded.driver.run(recorded.perform, recorded.drains.append))
    yield recorded
    recorded.driver.close()
    await running


async def test_a_command_is_performed_only_after_its_event_is_durable(
    recorded: RecordedDriver,
) -> None:
    assert await recorded.driver.submit(JOB, CREATED) == ""
    assert [(type(command), rows) for command, rows in recorded.performed] == [(InitialiseModel, 1)]


async def test_events_that_arrive_together_are_one_transaction(recorded: RecordedDriver) -> None:
    await asyncio.gather(
        recorded.driver.submit(JOB, CREATED), recorded.driver.submit(JOB, JobPaused(at_ms=NOW))
    )
    assert len(recorded.drains) == 1
    assert recorded.driver.runtimes[JOB].job.phase is Phase.PAUSED


async def test_a_refused_event_is_answered_and_not_journalled(recorded: RecordedDriver) -> None:
    assert "there is no job" in await recorded.driver.submit(JOB, JobPaused(at_ms=NOW))
    await recorded.driver.submit(JOB, CREATED)
    await recorded.driver.submit(JOB, JobPaused(at_ms=NOW))

    assert "is paused" in await recorded.driver.submit(JOB, JobPaused(at_ms=NOW))
    assert len(recorded.journal.read(JOB).entries) == 2


async def test_a_full_disk_changes_nothing_and_is_told(recorded: RecordedDriver) -> None:
    await recorded.driver.submit(JOB, CREATED)
    recorded.journal.is_full = True
    with pytest.raises(HyperGPUError, match="no space"):
        await recorded.driver.submit(JOB, JobPaused(at_ms=NOW))
    assert recorded.driver.runtimes[JOB].job.phase is Phase.PREPARING

    recorded.journal.is_full = False
    assert await recorded.driver.submit(JOB, JobPaused(at_ms=NOW)) == ""


async def test_a_replay_gives_the_state_that_was_left(recorded: RecordedDriver) -> None:
    await recorded.driver.submit(JOB, CREATED)
    await recorded.driver.submit(JOB, JobPaused(at_ms=NOW))

    before, after = recorded.driver.runtimes[JOB], replay_jobs(recorded.journal).runtimes[JOB]
    assert (after.job, after.next_sequence) == (before.job, before.next_sequence)
    assert 0 <= after.now_ms() - recorded.journal.read(JOB).entries[-1].at_ms < 100_000


async def test_a_request_is_claimed_with_the_event_it_caused(recorded: RecordedDriver) -> None:
    claim = RequestClaim("a request", JOB, Digest("0" * 64))
    await recorded.driver.submit(JOB, CREATED, claim)
    assert recorded.journal.request("a request") == claim


async def test_a_job_removed_while_its_events_are_written_stays_removed(
    recorded: RecordedDriver,
) -> None:
    await recorded.driver.submit(JOB, CREATED)
    verdict = recorded.driver.submit(JOB, JobPaused(at_ms=NOW))
    del recorded.driver.runtimes[JOB]

    await verdict
    assert JOB not in recorded.driver.runtimes


async def test_what_arrived_just_before_the_end_is_written_and_the_driver_ends(
    tmp_path: Path,
) -> None:
    recorded = RecordedDriver(tmp_path)
    running = asyncio.create_task(recorded.driver.run(recorded.perform, recorded.drains.append))
    await asyncio.sleep(0)
    verdict = recorded.driver.submit(JOB, CREATED)
    recorded.driver.close()

    async with asyncio.timeout(240):
        await running
    assert verdict.result() == ""
