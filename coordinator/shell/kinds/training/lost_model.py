"""Reports that files of a job's model are damaged, so that the model is made again."""

import structlog

from coordinator.core.training.job.events import ModelLost
from coordinator.shell.driver.driver import Driver
from hypergpu.ids import Digest, JobId
from hypergpu.units import Milliseconds

log = structlog.get_logger()


async def report_lost_model(driver: Driver, job_id: JobId, model: Digest, why: str) -> None:
    """Insist on having a damaged model made again."""
    log.error("a model is damaged", job_id=job_id, model=model, reason=why)
    event = ModelLost(at_ms=Milliseconds(0), model=model, reason=why)
    if reason := await driver.insist(job_id, event):
        log.error("a damaged model is not made again", job_id=job_id, reason=reason)
