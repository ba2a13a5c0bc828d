import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from coordinator.core.job.events import (
    Event,
    JobCreated,
    JobPaused,
    JobResumed,
    ModelInitialised,
    NodeJoined,
    NodeLost,
)
from coordinator.core.job.state import Model, Phase
from coordinator.shell.commands.perform import perform, perform_outstanding, retry_after_resume
from coordinator.shell.evaluator.messages import Evaluate, Evaluated, Initialise, Initialised
from coordinator.shell.evaluator.process import EvaluatorProcess
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.jobfile import with_strategy
from hypergpu.units import Milliseconds, Samples
from tests.unit.aggregation.fold_files import LAYOUT
from tests.unit.shell.whole_shell import JOB, NODE, SPEC, driving, prepared_job, services_in

NOW = Milliseconds(0)
CREATED = JobCreated(at_ms=NOW, job_id=JOB, spec=SPEC)


class BreakingEvaluator(EvaluatorProcess):
    """Ends each request, once it may, with the next error; the last one for ever."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self._errors = list(errors)
        self.may_go_on = asyncio.Event()

    async def initialise(self, request: Initialise) -> Initialised:
        await self.may_go_on.wait()
        raise self._errors.pop(0) if len(self._errors) > 1 else self._errors[0]


class ForgetfulEvaluator(EvaluatorProcess):
    """Breaks on every model."""

    async def evaluate(self, request: Evaluate) -> Evaluated:
        raise MemoryError("no more")


@asynccontextmanager
async def acting(services: Services) -> AsyncIterator[None]:
    """Run the driver and perform its commands inside the block."""
    driver = services.driver
    running = asyncio.create_task(
        driver.run(lambda runtime, command: perform(services, runtime, command), lambda *_: None)
    )
    try:
        yield
    finally:
        for runtime in driver.runtimes.values():
            runtime.close()
        driver.close()
        await running


async def until(runtime: JobRuntime, is_so: Callable[[], bool]) -> None:
    """Wait for a state of the job."""
    while not is_so():
        await runtime.change().wait()


async def test_a_command_that_breaks_is_performed_again(tmp_path: Path) -> None:
    refused = HyperGPUError(Reason.SPEC_INVALID, "the data is odd. Fix: look at it")
    evaluator = BreakingEvaluator(MemoryError(), refused)
    evaluator.may_go_on.set()
    services = services_in(tmp_path)._replace(evaluator=evaluator)
    async with acting(services):
        await services.driver.submit(JOB, CREATED)
        runtime = services.driver.runtimes[JOB]
        await until(runtime, lambda: runtime.job.phase is Phase.FAILED)
    assert runtime.job.reason == "the data is odd. Fix: look at it"


async def test_a_command_that_breaks_too_often_pauses_its_job_with_the_reason(
    tmp_path: Path,
) -> None:
    evaluator = BreakingEvaluator(MemoryError("no more"))
    services = services_in(tmp_path)._replace(evaluator=evaluator)
    async with acting(services):
        await services.driver.submit(JOB, CREATED)
        runtime = services.driver.runtimes[JOB]
        runtime.failures["initialise", 0] = 3
        evaluator.may_go_on.set()
        await until(runtime, lambda: runtime.job.phase is Phase.PAUSED)
        why = "initialise broke 4 times, the last time by MemoryError: no more"
        assert runtime.job.reason == why

        evaluator.may_go_on.clear()
        await services.driver.submit(JOB, JobResumed(at_ms=NOW))
        retry_after_resume(services, runtime)
        assert ("initialise", 0) in runtime.tasks
        assert (runtime.is_given_up, runtime.failures) == (False, {})


async def test_a_command_that_cannot_be_started_does_not_stop_the_driver(tmp_path: Path) -> None:
    evaluator = BreakingEvaluator(MemoryError())
    services = services_in(tmp_path)._replace(evaluator=evaluator)
    async with acting(services):
        runtime = await prepared_job(services)
        runtime.job = replace(runtime.job, layout=Digest("no digest"))
        assert await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE)) == ""
        assert runtime.failures["AssignShard", 0] == 1
        assert await services.driver.submit(JOB, JobPaused(at_ms=NOW)) == ""


async def test_an_evaluation_that_breaks_too_often_is_left_out(tmp_path: Path) -> None:
    services = services_in(tmp_path)._replace(evaluator=ForgetfulEvaluator())
    model = Model(1, services.blobs.put(b"a model"))
    async with driving(services):
        runtime = await prepared_job(services)
        runtime.job = replace(runtime.job, evaluating=(model,))
        runtime.layout = LAYOUT
        runtime.failures["evaluate", 1] = 3
        perform_outstanding(services, runtime)
        await until(runtime, lambda: not runtime.job.evaluating)
    assert services.journal.read(JOB).entries[-1].kind == "EvaluationFailed"
    assert runtime.job.phase is Phase.WAITING


async def aware_job(services: Services) -> JobRuntime:
    """A job that plans, with its first model and no node."""
    spec = with_strategy(SPEC, "aware")
    await services.driver.submit(JOB, JobCreated(at_ms=NOW, job_id=JOB, spec=spec))
    runtime = services.driver.runtimes[JOB]
    runtime.layout = LAYOUT
    first = Model(0, services.blobs.put(b"a model"))
    event = ModelInitialised(at_ms=NOW, model=first, partition_sizes=(Samples(100),))
    assert await services.driver.submit(JOB, event) == ""
    return runtime


async def test_a_plan_whose_nodes_have_gone_meanwhile_is_made_again(tmp_path: Path) -> None:
    services = services_in(tmp_path)._replace(evaluator=BreakingEvaluator(MemoryError()))
    other = NodeId("0x" + "b2" * 20)
    async with acting(services):
        runtime = await aware_job(services)
        happening: list[Event] = [
            NodeJoined(at_ms=NOW, node=NODE),
            NodeLost(at_ms=NOW, node=NODE, reason="silent"),
            NodeJoined(at_ms=NOW, node=other),
        ]
        await asyncio.gather(*(services.driver.submit(JOB, event) for event in happening))
        await until(runtime, lambda: runtime.job.phase is Phase.TRAINING)
    assert runtime.job.round is not None
    assert list(runtime.job.round.participants) == [other]
    kinds = [entry.kind for entry in services.journal.read(JOB).entries]
    assert kinds[-2:] == ["RoundPlanned", "RoundPlanned"]
