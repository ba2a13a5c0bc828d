"""Jobs of strangers, whose names may be anything, in files beside those of others."""

from pathlib import Path

import msgspec
import pytest

from hypergpu.user.client.values import JobEvent
from hypergpu.user.sinks.sink import named_sink, with_sinks
from hypergpu.user.terminal.watch import JobProgress, WatchView
from tests.unit.sinks.conftest import detail


@pytest.mark.parametrize("name", ["../out", "OUT", "..", ".x/../../out"])
def test_a_job_named_like_a_path_is_written_into_the_folder(
    name: str, journal: list[JobEvent], tmp_path: Path
) -> None:
    job = detail()
    name = name.replace("OUT", str(tmp_path / "out"))
    named_job = msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, name=name))
    root = tmp_path / "runs"
    with with_sinks(WatchView(), named_job, [named_sink(f"tensorboard:{root}")]) as view:
        for event in journal:
            view.event(event, JobProgress())
    (folder,) = root.iterdir()
    assert folder.name.endswith("job-0123456789ab")
    assert not folder.name.startswith(".")
    assert list(tmp_path.iterdir()) == [root]
