"""The examples of `hypergpu.client` against a real coordinator and a node."""

import asyncio
import doctest
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hypergpu
import hypergpu.client
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.user.client import HyperGPUError, JobEvent, Role, connect
from tests.processes import Cluster

JOB = """
workload = "digits-softmax"
strategy = "diloco"
[training]
rounds = 2
inner_steps = 2
nodes = 1
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("client"), is_plaintext=False) as cluster:
        cluster.add_nodes(1)
        yield cluster


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job file, in the shell of a user with a token."""
    with cluster.coordinator.client() as client:
        token = client.create_token(Role.USER, label="doctest").token
    for name in [name for name in os.environ if name.startswith("HYPERGPU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HYPERGPU_TOKEN", token)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "job.toml").write_text(JOB, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_examples_of_the_package_run_as_written(user: Path) -> None:
    names = {
        "asyncio": asyncio,
        "Path": Path,
        "JobEvent": JobEvent,
        "HyperGPUError": HyperGPUError,
        "connect_async": hypergpu.client.connect_async,
    }
    assert doctest.testmod(hypergpu.client, extraglobs=names).failed == 0
    assert (user / "model" / "model.safetensors").exists()


def test_a_profile_names_the_coordinator_too(user: Path) -> None:
    profile = user / "other.toml"
    token_file = user / "user.token"
    token_file.write_text(os.environ.pop("HYPERGPU_TOKEN"), "utf-8")
    profile.write_text(f'token_file = "{token_file}"\n', "utf-8")
    with connect(profile=profile) as coordinator:
        assert isinstance(coordinator.jobs(), list)


@pytest.mark.usefixtures("user")
def test_events_until_the_newest_do_not_wait_for_a_jobs_end() -> None:
    with connect() as coordinator:
        job = coordinator.submit(JobSpec("digits-softmax", training=TrainingSettings(nodes=99)))
        kinds = [event.kind for event in coordinator.read_events(job).until_newest()]
        assert kinds[0] == "JobCreated"
        coordinator.stop(job)


async def trained_without_blocking() -> None:
    """Submit a job and wait for it on an event loop that does other things meanwhile."""
    async with await hypergpu.client.connect_async() as coordinator:
        run = hypergpu.AsyncRun(coordinator, await coordinator.submit("job.toml"))
        end_view, _ = await asyncio.gather(run.result(["tensorboard:curves"]), run.detail())
        assert end_view.job.phase == "finished"
        table = (await run.history()).frame()
        assert table.index.tolist() == [1, 2]
        assert table["samples"].sum() == end_view.job.samples
        assert await run.has_ended()
        assert (await run.save("saved")).model.exists()
        again = await hypergpu.AsyncRun.find(run.id, coordinator)
        assert (await again.watch()).job.model == end_view.job.model


def test_a_run_can_be_awaited(user: Path) -> None:
    asyncio.run(trained_without_blocking())
    assert any((user / "curves").iterdir())


@pytest.mark.usefixtures("user")
def test_a_stream_that_is_dropped_does_not_hold_up_the_next_call() -> None:
    with connect() as coordinator:
        job = coordinator.submit("job.toml")
        first = next(coordinator.watch(job))
        assert isinstance(first, JobEvent)
        assert first.kind == "JobCreated"
        assert coordinator.find_job() == job
