"""Starts what jobs of every kind have commanded, tries again what breaks, and pauses a job for
which that went on too long.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from coordinator.core.work.work_events import JobPaused, StampedEvent
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.kinds import WorkPerformer
from coordinator.shell.driver.work_runtime import WorkRuntime
from hypergpu.clock import monotonic_ms
from hypergpu.units import Milliseconds

log = structlog.get_logger()
_TRIES = 4
_PAUSES_S = (0.5, 2.0, 10.0)
_LONG_PAUSE_S = 60.0
_OnePerformer = TypeVar("_OnePerformer", bound=WorkPerformer)


class Performing:
    """Carries out commands of a driver's jobs by the performers of their kinds."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._performers: dict[str, WorkPerformer] = {}

    def add(self, kind: str, performer: WorkPerformer) -> None:
        """Let a performer carry out the commands of a kind, by the kind's name."""
        self._performers[kind] = performer

    def performer(self, kind: type[_OnePerformer]) -> _OnePerformer:
        """The performer of a type, for services of that kind alone."""
        return next(each for each in self._performers.values() if isinstance(each, kind))

    def performer_named(self, kind: str) -> WorkPerformer:
        """The performer of a kind, by its name."""
        return self._performers[kind]

    def performer_of(self, runtime: WorkRuntime[Any]) -> WorkPerformer:
        """The performer of a job's kind."""
        return self._performers[self.driver.kinds.of_job(runtime.job).core.name]

    def perform(self, runtime: WorkRuntime[Any], command: Any) -> None:
        """Start a command. While a job recovers only what its kind has named goes out, such as
        cancels: the rest is still outstanding.

        Whatever breaks here or in what was started concerns this job alone: it is tried again, and
        after a few tries the job is paused with the reason.
        """
        kind = self.driver.kinds.of_job(runtime.job)
        if runtime.is_recovering and not isinstance(command, kind.while_recovering):
            return
        key = (type(command).__name__, 0)
        try:
            self.performer_of(runtime).perform(runtime, command)
        except Exception as error:
            log.exception("a command broke", job_id=runtime.job.job_id, command=key[0])
            self._retry_or_give_up(runtime, key, error)
        else:
            runtime.failures.pop(key, None)

    def perform_outstanding(self, runtime: WorkRuntime[Any]) -> None:
        """Perform everything whose answer the job still waits for."""
        kind = self.driver.kinds.of_job(runtime.job)
        for command in kind.core.outstanding(runtime.job):
            self.perform(runtime, command)

    async def take_up(self, runtime: WorkRuntime[Any]) -> None:
        """Go on with a job after a start."""
        await self.performer_of(runtime).take_up(runtime)

    def after_drain(self, runtime: WorkRuntime[Any]) -> None:
        """Do what follows on a drain that changed the job."""
        self.performer_of(runtime).after_drain(runtime)

    async def pause(self, runtime: WorkRuntime[Any], why: str) -> str:
        """Pause a job that cannot go on. Returns why that is refused; empty when it is paused."""
        log.error("a job cannot go on and is paused", job_id=runtime.job.job_id, reason=why)
        runtime.is_given_up = True
        event = JobPaused(at_ms=Milliseconds(0), reason=why)
        refusal = await self.driver.insist(runtime.job.job_id, event)
        if not self.driver.kinds.of_job(runtime.job).core.is_paused(runtime.job):
            runtime.is_given_up = False
        return refusal

    def retry_after_resume(self, runtime: WorkRuntime[Any]) -> None:
        """After a resume: perform again the commands for which the coordinator paused the job."""
        if not runtime.is_given_up:
            return
        runtime.is_given_up = False
        runtime.failures.clear()
        self.perform_outstanding(runtime)

    def start(
        self,
        runtime: WorkRuntime[Any],
        key: tuple[str, int],
        work: Coroutine[object, object, object],
    ) -> None:
        """Run a long command unless the same one is under way."""
        if key in runtime.tasks:
            work.close()
            return
        task = asyncio.create_task(work, name=f"{runtime.job.job_id} {key[0]} {key[1]}")
        runtime.tasks[key] = task
        begun_ms = monotonic_ms()

        def check_end(task: "asyncio.Task[object]") -> None:
            runtime.tasks.pop(key, None)
            if task.cancelled():
                return
            exception = task.exception()
            if exception is None:
                runtime.failures.pop(key, None)
                took_ms = Milliseconds(monotonic_ms() - begun_ms)
                self.performer_of(runtime).after_command(runtime, key[0], took_ms)
                return
            self._retry_or_give_up(runtime, key, exception)
            log.error("a command broke", task=task.get_name(), exc_info=exception)

        task.add_done_callback(check_end)

    def report_at(
        self, runtime: WorkRuntime[Any], at_ms: Milliseconds, event: StampedEvent
    ) -> None:
        """Report an event at a job time. A job has one timer: a new one replaces the old."""
        if runtime.deadline_timer is not None:
            runtime.deadline_timer.cancel()

        def report() -> None:
            # Timers may fire a little early, and job time is coarser.
            if runtime.now_ms() < at_ms:
                self.report_at(runtime, at_ms, event)
                return
            # The timer before may still be reporting: a job has several, one after the other.
            work = self.driver.report(runtime.job.job_id, event)
            self.start(runtime, ("deadline", at_ms), work)

        left_s = max(0, at_ms - runtime.now_ms()) / 1000 + 0.001
        runtime.deadline_timer = asyncio.get_running_loop().call_later(left_s, report)

    def _retry_or_give_up(
        self, runtime: WorkRuntime[Any], key: tuple[str, int], broken: BaseException
    ) -> None:
        """Perform what is outstanding again after a while, or give up when that went on too
        long.
        """
        runtime.failures[key] += 1
        tries = runtime.failures[key]
        if tries == _TRIES:
            cause = f"{type(broken).__name__}: {broken}"
            why = f"{key[0]} broke {tries} times, the last time by {cause}"
            self.start(runtime, ("give up", key[1]), self._give_up(runtime, key, why))
        else:
            self._retry_later(runtime, _PAUSES_S[tries - 1] if tries < _TRIES else _LONG_PAUSE_S)

    async def _give_up(self, runtime: WorkRuntime[Any], key: tuple[str, int], why: str) -> None:
        """Do what the kind does without the command; where it has nothing, pause the job."""
        event = self.driver.kinds.of_job(runtime.job).without(*key, why)
        if event is not None:
            refusal = await self.driver.insist(runtime.job.job_id, event)
        else:
            refusal = await self.pause(runtime, why)
        if refusal:
            self._retry_later(runtime, _LONG_PAUSE_S)

    def _retry_later(self, runtime: WorkRuntime[Any], pause_s: float) -> None:
        if runtime.retry_timer is not None:
            runtime.retry_timer.cancel()
        runtime.retry_timer = asyncio.get_running_loop().call_later(
            pause_s, self.perform_outstanding, runtime
        )
