"""Decide, persist, act: one inbox for all jobs, one journal transaction a drain. Nothing is shown,
answered or performed before its event is durable. The kinds of jobs are those of a table.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from msgspec.structs import replace

from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.driver.decisions import Decision, decide
from coordinator.shell.driver.inbox import Inbox, SubmittedEvent
from coordinator.shell.driver.kinds import KindTable, OneKind, RuntimesOfKind
from coordinator.shell.driver.replay import Replay, state_json
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.failpoints import failpoint
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import RequestClaim
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds

log = structlog.get_logger()
_RETRY_S = 5.0
_Result = TypeVar("_Result")


class Driver:
    """The loop that all events of all jobs go through."""

    def __init__(self, journal: Journal, kinds: KindTable) -> None:
        """Write to a journal, for jobs of these kinds."""
        self.kinds = kinds
        self.runtimes: dict[JobId, WorkRuntime[Any]] = {}
        """Jobs of every kind."""
        self.unreadable: dict[JobId, str] = {}
        """Jobs that this version cannot replay, with the reason. Their blobs are not known."""
        self.journal = journal
        """Written by `in_writer` alone."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._inbox = Inbox()
        self.is_closing = False

    def runtimes_of(self, kind: type[OneKind]) -> RuntimesOfKind[OneKind]:
        """Jobs of one kind, by the type of their runtimes."""
        return RuntimesOfKind(self.runtimes, kind)

    def take_replay(self, replay: Replay) -> None:
        """Drive the jobs that a journal holds."""
        self.runtimes.update(replay.runtimes)
        self.unreadable.update(replay.unreadable)

    def submit(
        self, job_id: JobId, event: StampedEvent, claim: RequestClaim | None = None
    ) -> "asyncio.Future[str]":
        """Put an event into the inbox, stamped with its job's time.

        Returns:
            Why the machine refused it, or an empty string once it is durable and acted on. Raises
            `HyperGPUError` when the journal had no room for it.
        """
        runtime = self.runtimes.get(job_id)
        now_ms = runtime.now_ms() if runtime else Milliseconds(0)
        return self._inbox.put(job_id, replace(event, at_ms=now_ms), claim)

    async def insist(self, job_id: JobId, event: StampedEvent) -> str:
        """`submit` until the disk has room: for events that cannot be withdrawn."""
        while True:
            try:
                return await self.submit(job_id, event)
            except HyperGPUError as error:
                if (runtime := self.runtimes.get(job_id)) is not None:
                    runtime.obstacle = str(error)
                log.warning("an event waits for disk space", job_id=job_id, reason=str(error))
                await asyncio.sleep(_RETRY_S)

    async def report(self, job_id: JobId, event: StampedEvent) -> str:
        """`insist` on an answer that may come too late: then its rejection is logged."""
        reason = await self.insist(job_id, event)
        if reason:
            kind = type(event).__name__
            log.info("an answer came too late", job_id=job_id, kind=kind, reason=reason)
        return reason

    async def run(
        self,
        perform: Callable[[Any, Any], None],
        after_drain: Callable[[Decision], None],
    ) -> None:
        """Drain the inbox until `close`.

        Args:
            perform: Starts a command and returns at once.
            after_drain: Called after each drain.
        """
        async for events in self._inbox.drains():
            await self._drain(events, perform, after_drain)

    async def _drain(
        self,
        events: list[SubmittedEvent],
        perform: Callable[[Any, Any], None],
        after_drain: Callable[[Decision], None],
    ) -> None:
        failpoint("decide.begin")
        decision = decide(self.runtimes, events, self.kinds)
        failpoint("decide.done")
        if not await self._persist(decision):
            return
        failpoint("persist.written")
        self._take_over(decision)
        failpoint("act.begin")
        for job_id, command in decision.commands:
            if (runtime := self.runtimes.get(job_id)) is not None:
                perform(runtime, command)
                failpoint("act.command")
        after_drain(decision)
        failpoint("act.done")
        for verdict, text in decision.verdicts:
            if not verdict.done():
                verdict.set_result(text)
        await self._snapshot(decision)

    async def _persist(self, decision: Decision) -> bool:
        entries = decision.all_entries()
        if not entries:
            return True
        try:
            await self.in_writer(self.journal.append, entries, decision.claims)
        except HyperGPUError as error:
            for verdict, _ in decision.verdicts:
                if not verdict.done():
                    verdict.set_exception(error)
            return False
        return True

    def _take_over(self, decision: Decision) -> None:
        for job_id, job in decision.jobs.items():
            entries = decision.entries[job_id]
            if entries[0].sequence == 0:
                self.runtimes[job_id] = self.kinds.of_job(job).runtime(job, 0)
            # A job that was removed while its last events were written stays removed.
            if (runtime := self.runtimes.get(job_id)) is not None:
                runtime.advance(job, entries)

    async def _snapshot(self, decision: Decision) -> None:
        for job_id in decision.snapshots:
            runtime = self.runtimes.get(job_id)
            if runtime is None:
                continue
            failpoint("snapshot.begin")
            try:
                await self.in_writer(
                    self.journal.save_snapshot,
                    job_id,
                    runtime.next_sequence - 1,
                    state_json(runtime.job),
                )
            except HyperGPUError as error:
                log.warning("no snapshot was written", job_id=job_id, reason=str(error))
            failpoint("snapshot.written")

    async def in_writer(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Run a journal call in the one thread that writes it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, lambda: call(*arguments))

    def begin_closing(self) -> None:
        """End watchers' streams before the process ends; other calls still get answers."""
        self.is_closing = True
        for runtime in self.runtimes.values():
            runtime.wake()

    def close(self) -> None:
        """Let `run` return once everything in the inbox is persisted and acted on."""
        self._inbox.close()
