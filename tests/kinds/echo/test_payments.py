"""Payments follow jobs of kinds that are paid, and know no other kind."""

import asyncio
from pathlib import Path

from coordinator.config import Settings
from coordinator.core.training.job.events import JobCreated
from coordinator.shell.app.payments_host import PaymentsHost
from coordinator.shell.driver.driver import Driver
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from hypergpu.crypto import IdentityKey
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Milliseconds
from tests.journals import FolderJournal
from tests.kinds.echo.walk import created_job
from tests.kinds.table import KINDS_OF_TESTS


async def test_payments_follow_only_jobs_of_kinds_that_are_paid(tmp_path: Path) -> None:
    driver = Driver(FolderJournal(tmp_path), KINDS_OF_TESTS)
    driver_task = asyncio.create_task(driver.run(lambda *_: None, lambda *_: None))
    settings, nodes = Settings(data_dir=tmp_path), ConnectedNodes(driver.journal.pauses())
    host = PaymentsHost(settings, IdentityKey.generate(), driver, nodes)
    training, echo = JobId("job-00000000000a"), JobId("job-00000000000e")
    spec = JobSpec(workload="digits-softmax")
    first_event = JobCreated(at_ms=Milliseconds(0), job_id=training, spec=spec)
    assert await driver.submit(training, first_event) == ""
    assert await driver.submit(echo, created_job(3, echo)) == ""
    assert host.jobs() == (training,)
    driver.close()
    await driver_task
