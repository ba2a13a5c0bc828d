"""Decide, persist, act: one inbox for all jobs, one journal transaction a drain, replay at a start.
Nothing is shown, answered or performed before its event is durable.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from coordinator.core.hub.health import HealthEvidence, health_evidence
from coordinator.core.persistent_map import PersistentMap
from coordinator.core.training.job.commands import Command
from coordinator.core.training.job.events import (
    AggregateReady,
    Event,
    JobCreated,
    ModelLost,
    PaymentEvent,
    UpdateReceived,
    UpdateRejected,
)
from coordinator.core.training.job.state import Job
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.aggregation.measurements import RoundMeasurements
from coordinator.shell.failpoints import failpoint
from coordinator.shell.journal.journal import Journal
from coordinator.shell.journal.records import Entry, JournalError, RequestClaim
from coordinator.shell.runtime.command_times import CommandTimes
from coordinator.shell.runtime.workload_versions import catalogue_version
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.streams import monotonic_ms
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds

_RECENT_ENTRIES = 512


class JobClock:
    """One job's time: the last journalled time plus what passed since this process began."""

    def __init__(self, last_at_ms: Milliseconds) -> None:
        self._offset_ms = last_at_ms - monotonic_ms()

    def now_ms(self) -> Milliseconds:
        """Job time now. Downtime counts nothing, and wall clocks may jump."""
        return Milliseconds(self._offset_ms + monotonic_ms())


_OBSTACLES = frozenset({Reason.DISK_FULL, Reason.STORE_UNREACHABLE})


class JobRuntime:
    """One job in this process."""

    obstacle = ""  # a numbered reason for which the job waits, such as a full disk
    takeover = ""
    """Sentence on how this coordinator came to drive it; empty: nobody else did."""
    progress_version = 0
    """Raised whenever a participant says how far it is."""

    def __init__(self, job: Job, next_sequence: int) -> None:
        self.job = job
        """The newest state that is persisted."""
        self.next_sequence = next_sequence
        self.clock = JobClock(job.at_ms)
        self.workload_version = catalogue_version(job.spec.workload)
        """0 when the catalogue no longer has the workload: then no node fits it."""
        self.operators = frozenset(job.operators)
        """Operators of torch that its nodes must have; known a moment before the journal is."""
        self.layout: Layout | None = None
        """The model's layout; None until the first model is made."""
        self.entries_of_manifest = frozenset[Digest]() if job.manifest is None else None
        """The user's files that the job trains on; None until its manifest is read."""
        self.bytes_down = Bytes(0)
        """Model bytes served since the last aggregate."""
        self.deadline_timer: asyncio.TimerHandle | None = None
        self.tasks: dict[tuple[str, int], asyncio.Task[object]] = {}
        """Long commands under way, by kind and round; none is started twice."""
        self.failures: Counter[tuple[str, int]] = Counter()
        """Unforeseen errors of each of them, in a row."""
        self.retry_timer: asyncio.TimerHandle | None = None
        """Timer after which outstanding commands are performed again."""
        self.is_given_up = False
        """Whether this process could not do something and paused the job: a resume tries again."""
        self.is_recovering = False
        """After a restart: its model is being checked and nothing outstanding was performed yet."""
        self._recent: deque[Entry] = deque(maxlen=_RECENT_ENTRIES)
        self._changed = asyncio.Event()
        self.measurements = RoundMeasurements()
        self.settings_lock = asyncio.Lock()
        """Held while new settings are made out of the present ones and written."""

    @property
    def required_layout(self) -> Layout:
        """The model's layout, for commands that come only once it is known."""
        if self.layout is None:
            raise AssertionError("the model's layout is not known yet")
        return self.layout

    def now_ms(self) -> Milliseconds:
        """Job time now."""
        return self.clock.now_ms()

    def advance(self, job: Job, entries: Sequence[Entry]) -> None:
        """Take over what was persisted and wake whoever watches."""
        self.job, self.obstacle = job, ""
        self.next_sequence += len(entries)
        self._recent.extend(entries)
        self.wake()

    @contextmanager
    def tell_obstacle(self) -> Iterator[None]:
        """Let the job say why it waits where what is done for it meets a lack that may pass."""
        try:
            yield
        except HyperGPUError as refused:
            if refused.reason in _OBSTACLES and self.obstacle != str(refused):
                self.obstacle = str(refused)
                log.warning("a job waits", job_id=self.job.job_id, reason=str(refused))
            raise

    def open_uploads(self) -> list[str]:
        """Uploads that participants may make now, as the quarantine names them."""
        participants = self.job.round.participants if self.job.round else {}
        return [
            upload_owner(self.job.job_id, node)
            for node, participant in (*participants.items(), *self.job.long_leases.items())
            if participant.is_open
        ]

    def wake(self) -> None:
        """Let watchers look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def change(self) -> asyncio.Event:
        """Set at the next `advance` or `wake`."""
        return self._changed

    def recent_entries(self, from_sequence: int) -> tuple[Entry, ...] | None:
        """Entries from ``from_sequence`` on; None when they are no longer in memory."""
        if from_sequence >= self.next_sequence:
            return ()
        if not self._recent or self._recent[0].sequence > from_sequence:
            return None
        return tuple(self._recent)[from_sequence - self._recent[0].sequence :]

    def close(self) -> None:
        """Drop timers and tasks."""
        for timer in filter(None, (self.deadline_timer, self.retry_timer)):
            timer.cancel()
        self.deadline_timer = self.retry_timer = None
        for task in (*self.tasks.values(), *self.measurements.tasks):
            task.cancel()


def upload_owner(job_id: JobId, node: NodeId) -> str:
    """A node in one job, as the quarantine knows it: it has one upload at a time."""
    return f"update/{job_id}/{node}"


log = structlog.get_logger()
_encoder = msgspec.json.Encoder(enc_hook=PersistentMap.to_dict)
_events = msgspec.json.Decoder(Event)
_jobs = msgspec.json.Decoder(Job)


def event_entry(job_id: JobId, sequence: int, event: StampedEvent) -> Entry:
    """An event as a row."""
    return Entry(job_id, sequence, event.at_ms, type(event).__name__, _encoder.encode(event))


def state_json(job: Job) -> bytes:
    """A state for a snapshot."""
    return _encoder.encode(job)


def stored_state(stored: bytes) -> Job:
    """Read a snapshot.

    Raises:
        msgspec.ValidationError: another version of the machine wrote it.
    """
    return _jobs.decode(stored)


def replay_entries(job: Job | None, entries: Iterable[Entry]) -> Job | None:
    """The state after ``entries``; None when there were none to begin with.

    Raises:
        msgspec.ValidationError: a row is no event that this version knows.
    """
    for row in entries:
        job = transition(job, _events.decode(row.body_json)).job
    return job


class Replay(NamedTuple):
    """Every job of a journal."""

    runtimes: dict[JobId, JobRuntime]
    unreadable: dict[JobId, str]
    """Jobs whose rows this version does not know, and why."""


def replay_jobs(journal: Journal) -> Replay:
    """Every job as far as its journal holds; a damaged end is cut off and reported. Blocks."""
    replay = Replay({}, {})
    for job_id in journal.jobs():
        try:
            runtime = _replay_job(journal, job_id)
        except JournalError:
            raise
        except Exception as broken:
            log.exception("a job cannot be replayed and rests", job_id=job_id)
            replay.unreadable[job_id] = f"{type(broken).__name__}: {broken}"
            continue
        if runtime is None:
            log.error("nothing of a job's journal holds: the job is removed", job_id=job_id)
            journal.remove_job(job_id)
        else:
            replay.runtimes[job_id] = runtime
    return replay


def _replay_job(journal: Journal, job_id: JobId) -> JobRuntime | None:
    recovery = journal.recover(job_id)
    for damage in recovery.damages:
        log.error("a journal is damaged and cut back", job_id=job_id, reason=damage)
    snapshot, entries = recovery.snapshot, recovery.entries
    before = stored_state(snapshot.state_json) if snapshot else None
    job = replay_entries(before, entries)
    if job is None:
        return None
    last = entries[-1].sequence if entries or snapshot is None else snapshot.head.sequence
    runtime = JobRuntime(job, last + 1)
    runtime.is_recovering = True
    return runtime


SNAPSHOT_ROUNDS_MAX = 50
"""A job that evaluates less often is snapshot anyway."""
_RETRY_S = 5.0
_WITHIN_A_ROUND = UpdateReceived | UpdateRejected
"""Events once a node and round: an allocation after each would cost too much."""
Result = TypeVar("Result")


class SubmittedEvent(NamedTuple):
    """An event in the inbox."""

    job_id: JobId
    event: Event
    verdict: "asyncio.Future[str]"
    claim: RequestClaim | None = None


class Decision:
    """Result of one drain, before any of it is durable."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.entries: dict[JobId, list[Entry]] = {}
        self.claims: list[RequestClaim] = []
        self.concerns_payments = False
        """Whether events are among the entries that payments fold."""
        self.commands: list[tuple[JobId, Command]] = []
        self.verdicts: list[tuple[asyncio.Future[str], str]] = []
        self.snapshots: set[JobId] = set()
        self.evidence: list[HealthEvidence] = []
        """What the events say of nodes' health."""
        self.moves_nodes = False
        """Whether a change calls for a new allocation of nodes to jobs."""

    def all_entries(self) -> list[Entry]:
        """Every entry, job by job."""
        return [entry for entries in self.entries.values() for entry in entries]


def decide(runtimes: dict[JobId, JobRuntime], events: Sequence[SubmittedEvent]) -> Decision:
    """Run the machines over the events in order. Changes nothing."""
    decision = Decision()
    for submitted in events:
        try:
            verdict = _decide(runtimes, decision, submitted)
        except Exception:
            # One event that breaks its machine must not stop every other job.
            log.exception("an event broke the machine", job_id=submitted.job_id)
            verdict = (
                f"the machine broke on {type(submitted.event).__name__}: see the coordinator's log"
            )
        decision.verdicts.append((submitted.verdict, verdict))
    return decision


def _decide(
    runtimes: dict[JobId, JobRuntime], decision: Decision, submitted: SubmittedEvent
) -> str:
    job_id, event = submitted.job_id, submitted.event
    runtime = runtimes.get(job_id)
    job = decision.jobs.get(job_id) or (runtime.job if runtime else None)
    if job is None and not isinstance(event, JobCreated):
        return f"there is no job {job_id}"
    if job is not None and (reason := rejection(job, event)):
        return reason
    step = transition(job, event)
    records = [command.record for command in step.commands if isinstance(command, WriteRecord)]
    entries = decision.entries.setdefault(job_id, [])
    start = runtime.next_sequence if runtime else 0
    for row in (event, *records):
        entries.append(event_entry(job_id, start + len(entries), row))
        decision.concerns_payments |= isinstance(row, PaymentEvent)
    decision.jobs[job_id] = step.job
    decision.commands += [
        (job_id, command) for command in step.commands if not isinstance(command, WriteRecord)
    ]
    decision.evidence += [] if job is None else health_evidence(job, event, step.job)
    if submitted.claim is not None:
        decision.claims.append(submitted.claim)
    if job is None or step.job.phase is not job.phase or not isinstance(event, _WITHIN_A_ROUND):
        decision.moves_nodes = True
    if _is_snapshot_due(step.job, event):
        decision.snapshots.add(job_id)
    return ""


def _is_snapshot_due(job: Job, event: Event) -> bool:
    if not isinstance(event, AggregateReady):
        return False
    return event.model.round % min(job.spec.evaluation.every, SNAPSHOT_ROUNDS_MAX) == 0


class Driver:
    """The loop that all events of all jobs go through."""

    def __init__(self, journal: Journal) -> None:
        """Write to a journal."""
        self.runtimes: dict[JobId, JobRuntime] = {}
        self.unreadable: dict[JobId, str] = {}
        """Jobs that this version cannot replay, with the reason. Their blobs are not known."""
        self.command_times = CommandTimes()
        """Times of commands that were carried out."""
        self._journal = journal
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._inbox: list[SubmittedEvent] = []
        self._has_events = asyncio.Event()
        self.is_closing = False
        self._is_closed = False

    def submit(
        self, job_id: JobId, event: Event, claim: RequestClaim | None = None
    ) -> "asyncio.Future[str]":
        """Put an event into the inbox, stamped with its job's time.

        Returns:
            Why the machine refused it, or an empty string once it is durable and acted on. Raises
            `HyperGPUError` when the journal had no room for it.
        """
        runtime = self.runtimes.get(job_id)
        now_ms = runtime.now_ms() if runtime else Milliseconds(0)
        verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._inbox.append(SubmittedEvent(job_id, replace(event, at_ms=now_ms), verdict, claim))
        self._has_events.set()
        return verdict

    async def insist(self, job_id: JobId, event: Event) -> str:
        """`submit` until the disk has room: for events that cannot be withdrawn."""
        while True:
            try:
                return await self.submit(job_id, event)
            except HyperGPUError as refused:
                if (runtime := self.runtimes.get(job_id)) is not None:
                    runtime.obstacle = str(refused)
                log.warning("an event waits for disk space", job_id=job_id, reason=str(refused))
                await asyncio.sleep(_RETRY_S)

    async def report_lost_model(self, job_id: JobId, model: Digest, why: str) -> None:
        """`insist` on having a damaged model made again."""
        log.error("a model is damaged", job_id=job_id, model=model, reason=why)
        lost = ModelLost(at_ms=Milliseconds(0), model=model, reason=why)
        if reason := await self.insist(job_id, lost):
            log.error("a damaged model is not made again", job_id=job_id, reason=reason)

    async def report(self, job_id: JobId, event: Event) -> str:
        """`insist` on an answer that may come too late: then its rejection is logged."""
        reason = await self.insist(job_id, event)
        if reason:
            kind = type(event).__name__
            log.info("an answer came too late", job_id=job_id, kind=kind, reason=reason)
        return reason

    async def run(
        self,
        perform: Callable[[JobRuntime, Command], None],
        after_drain: Callable[[Decision], None],
    ) -> None:
        """Drain the inbox until `close`.

        Args:
            perform: Starts a command and returns at once.
            after_drain: Called after each drain.
        """
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            events, self._inbox = self._inbox, []
            if events:
                await self._drain(events, perform, after_drain)
            # What arrived during a drain has raised the signal again.
            if self._is_closed and not self._inbox:
                return

    async def _drain(
        self,
        events: list[SubmittedEvent],
        perform: Callable[[JobRuntime, Command], None],
        after_drain: Callable[[Decision], None],
    ) -> None:
        failpoint("decide.begin")
        decision = decide(self.runtimes, events)
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
            await self.in_writer(self._journal.append, entries, decision.claims)
        except HyperGPUError as refused:
            for verdict, _ in decision.verdicts:
                if not verdict.done():
                    verdict.set_exception(refused)
            return False
        return True

    def _take_over(self, decision: Decision) -> None:
        for job_id, job in decision.jobs.items():
            entries = decision.entries[job_id]
            if entries[0].sequence == 0:
                self.runtimes[job_id] = JobRuntime(job, next_sequence=0)
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
                    self._journal.save_snapshot,
                    job_id,
                    runtime.next_sequence - 1,
                    state_json(runtime.job),
                )
            except HyperGPUError as refused:
                log.warning("no snapshot was written", job_id=job_id, reason=str(refused))
            failpoint("snapshot.written")

    async def in_writer(self, call: Callable[..., Result], *arguments: object) -> Result:
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
        self._is_closed = True
        self._has_events.set()
