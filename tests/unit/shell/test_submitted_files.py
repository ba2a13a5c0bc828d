"""Job files of when a job without a strategy was of `diloco`: they are submitted unchanged."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.shell.service.calls import Caller
from hypergpu.ids import JobId
from hypergpu.jobfile.reading import parse_job, parse_job_table, spec_json
from hypergpu.jobfile.spec import PLANNED, JobSpec
from hypergpu.jobfile.toml import KeyLines
from hypergpu.v1 import job_pb2
from netsim.network.world_file import read_world_file
from tests.unit.shell.test_job_services import Context
from tests.unit.shell.whole_shell import driving, services_in

VECTORS = Path(__file__).parents[2] / "vectors" / "jobs"
CALLER = Caller(Context(), "CreateJob")


class SubmittedFile(NamedTuple):
    """A job file, and what it says."""

    name: str
    settings: Mapping[str, Any]
    spec: JobSpec


def files() -> Iterator[SubmittedFile]:
    for path in sorted(VECTORS.rglob("*.toml")):
        name, text = str(path.relative_to(VECTORS)), path.read_text()
        if path.parent.name != "worlds":
            yield SubmittedFile(name, tomllib.loads(text), parse_job(text))
        elif spec := read_world_file(path).job:
            job = tomllib.loads(text)["job"]
            text = (path.parent / job).read_text() if isinstance(job, str) else ""
            yield SubmittedFile(name, tomllib.loads(text) if text else job, spec)
    for number, test_case in enumerate(json.loads((VECTORS / "tests.json").read_text())):
        name = f"tests-{number}"
        if "text" in test_case:
            yield SubmittedFile(
                name, tomllib.loads(test_case["text"]), parse_job(test_case["text"])
            )
        else:
            spec = parse_job_table(test_case["settings"], KeyLines("settings"))
            yield SubmittedFile(name, test_case["settings"], spec)


def test_every_file_is_there() -> None:
    names = [each.name for each in files()]
    assert len(names) == 82
    assert len({each.partition("/")[0].partition("-")[0] for each in names}) == 3


def states(settings: Mapping[str, Any], key: str) -> bool:
    table, _, name = key.partition(".")
    return name in settings.get(table, {})


def test_the_default_is_planned_and_keeps_what_a_file_states() -> None:
    unstated_files = [each for each in files() if "strategy" not in each.settings]
    assert {each.spec.strategy for each in unstated_files} == {"aware"}
    for each in unstated_files:
        stated_keys = tuple(key for key in PLANNED if states(each.settings, key))
        assert each.spec.aware.stated_keys == stated_keys, each.name
        has_deadline = states(each.settings, "round.deadline")
        assert bool(each.spec.round.deadline_ms) is has_deadline, each.name
    assert sum(bool(each.spec.aware.stated_keys) for each in unstated_files) >= 5
    assert sum(each.spec.round.deadline_ms > 0 for each in unstated_files) >= 5


async def test_a_coordinator_takes_each_file_unchanged(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        for each in files():
            request = job_pb2.CreateJobRequest(request_id=each.name, spec_json=spec_json(each.spec))
            answer = await services.job_servicer().create_job(request, CALLER)
            spec = services.jobs[JobId(answer.job_id)].job.spec
            assert (spec.strategy, spec.aware) == (each.spec.strategy, each.spec.aware), each.name
