import asyncio
from pathlib import Path

from coordinator.core.job.events import JobStopped, NodeJoined
from coordinator.shell.runtime.connected_nodes import ControlStream
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.servicers.user.watch import participants, watch_job
from coordinator.shell.translate import Capabilities
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, prepared_job, services_in


async def test_a_watch_ends_when_its_job_is_removed_before_all_is_told(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        await services.driver.submit(JOB, JobStopped(at_ms=Milliseconds(0)))
    # As after a restart: what a watcher has not seen is in the journal alone.
    runtime = JobRuntime(runtime.job, runtime.next_sequence)
    services.journal.remove_job(JOB)
    services.driver.runtimes.clear()

    async with asyncio.timeout(240):
        assert [message async for message in watch_job(services, runtime, 1)] == []


async def test_a_participant_is_told_by_its_name_until_its_node_is_forgotten(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    session = ControlStream(
        NODE, Capabilities(name="attic", workloads={"digits-softmax": 1}), "test"
    )
    services.nodes.connect(session)
    async with driving(services):
        runtime = await prepared_job(services)
        joined = NodeJoined(at_ms=Milliseconds(0), node=NODE)
        assert await services.driver.submit(JOB, joined) == ""
    services.nodes.disconnect(session)
    assert [each.name for each in participants(services.nodes, runtime.job)] == ["attic"]
    services.nodes.forget(NODE)
    assert [each.name for each in participants(services.nodes, runtime.job)] == [""]
