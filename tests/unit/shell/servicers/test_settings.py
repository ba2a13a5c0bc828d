import asyncio
from pathlib import Path
from typing import Any

from coordinator.shell.servicers.user.job import JobServicer
from hypergpu.v1 import job_pb2
from tests.unit.shell.whole_shell import JOB, driving, prepared_job, services_in

NOBODY: Any = None
"""Who calls makes no difference to these methods."""


async def test_settings_changed_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    servicer = JobServicer(services)
    changes = {"inner.learning_rate": "0.5", "training.rounds": "77", "round.quorum": "0.25"}
    async with driving(services):
        runtime = await prepared_job(services)
        requests = [
            job_pb2.SetParametersRequest(job_id=JOB, parameters={key: value})
            for key, value in changes.items()
        ]
        await asyncio.gather(*(servicer.set_parameters(each, NOBODY) for each in requests))
    spec = runtime.job.next_spec or runtime.job.spec
    assert (spec.inner.learning_rate, spec.training.rounds, spec.round.quorum) == (0.5, 77, 0.25)
