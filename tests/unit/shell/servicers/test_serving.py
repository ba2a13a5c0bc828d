from pathlib import Path

import pytest

from coordinator.core.job.events import NodeJoined
from coordinator.shell.servicers.serving import BlobRange, fetch_blob
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, prepared_job, services_in


@pytest.mark.parametrize(
    ("is_recovering", "reason"), [(True, Reason.NOT_READY), (False, Reason.BLOB_UNKNOWN)]
)
async def test_an_unknown_blob_is_unknown_only_once_the_job_is_taken_up(
    is_recovering: bool,  # noqa: FBT001  a parameter of the test
    reason: Reason,
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        await services.driver.submit(JOB, NodeJoined(at_ms=Milliseconds(0), node=NODE))
    runtime.is_recovering = is_recovering
    with pytest.raises(HyperGPUError) as refused:
        await anext(fetch_blob(services, NODE, BlobRange(digest_of(b"of the manifest"))))
    assert refused.value.reason is reason
