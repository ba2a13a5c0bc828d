from pathlib import Path

import pytest

from coordinator.core.events import NodeJoined
from coordinator.shell.servicers.serving import Span, fetch
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, parts_in, prepared_job


@pytest.mark.parametrize(
    ("is_recovering", "reason"), [(True, Reason.NOT_READY), (False, Reason.BLOB_UNKNOWN)]
)
async def test_an_unknown_blob_is_unknown_only_once_the_job_is_taken_up(
    is_recovering: bool,  # noqa: FBT001  a parameter of the test
    reason: Reason,
    tmp_path: Path,
) -> None:
    parts = parts_in(tmp_path)
    async with driving(parts):
        room = await prepared_job(parts)
        await parts.driver.submit(JOB, NodeJoined(at_ms=Milliseconds(0), node=NODE))
    room.is_recovering = is_recovering
    with pytest.raises(HyperGPUError) as refused:
        await anext(fetch(parts, NODE, Span(digest_of(b"of the manifest"))))
    assert refused.value.reason is reason
