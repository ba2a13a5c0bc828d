"""What a drain of the inbox decides, before any of it is durable."""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog

from coordinator.core.hub.health import HealthEvidence
from coordinator.core.work.members import LeasedJob
from coordinator.core.work.work_commands import WriteRecord
from coordinator.shell.driver.inbox import SubmittedEvent
from coordinator.shell.driver.kinds import KindTable, Runtimes
from coordinator.shell.driver.replay import event_entry
from coordinator.shell.store.journal.records import Entry, RequestClaim
from hypergpu.ids import JobId

log = structlog.get_logger()


class Decision:
    """Result of one drain, before any of it is durable."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, LeasedJob] = {}
        self.entries: dict[JobId, list[Entry]] = {}
        self.claims: list[RequestClaim] = []
        self.concerns_payments = False
        """Whether events are among the entries that payments fold."""
        self.commands: list[tuple[JobId, Any]] = []
        self.verdicts: list[tuple[asyncio.Future[str], str]] = []
        self.snapshots: set[JobId] = set()
        self.evidence: list[HealthEvidence] = []
        """What the events say of nodes' health."""
        self.moves_nodes = False
        """Whether a change calls for a new allocation of nodes to jobs."""

    def all_entries(self) -> list[Entry]:
        """Every entry, job by job."""
        return [entry for entries in self.entries.values() for entry in entries]


def decide(runtimes: Runtimes, events: Sequence[SubmittedEvent], kinds: KindTable) -> Decision:
    """Run the machines over the events in order. Changes nothing."""
    decision = Decision()
    for submission in events:
        try:
            verdict = _decide(runtimes, decision, submission, kinds)
        except Exception:
            # One event that breaks its machine must not stop every other job.
            log.exception("an event broke the machine", job_id=submission.job_id)
            verdict = (
                f"the machine broke on {type(submission.event).__name__}: see the coordinator's log"
            )
        decision.verdicts.append((submission.verdict, verdict))
    return decision


def _decide(
    runtimes: Runtimes, decision: Decision, submitted: SubmittedEvent, kinds: KindTable
) -> str:
    job_id, event = submitted.job_id, submitted.event
    runtime = runtimes.get(job_id)
    job = decision.jobs.get(job_id) or (runtime.job if runtime else None)
    kind = kinds.begun_by(event) if job is None else kinds.of_job(job)
    if kind is None:
        return f"there is no job {job_id}"
    machine = kind.core
    if job is not None and (reason := machine.rejection(job, event)):
        return reason
    step = machine.transition(job, event)
    records = [command.record for command in step.commands if isinstance(command, WriteRecord)]
    entries = decision.entries.setdefault(job_id, [])
    start = runtime.next_sequence if runtime else 0
    for row in (event, *records):
        entries.append(event_entry(job_id, start + len(entries), row))
        decision.concerns_payments |= isinstance(row, machine.paid_by)
    decision.jobs[job_id] = step.job
    decision.commands += [
        (job_id, command) for command in step.commands if not isinstance(command, WriteRecord)
    ]
    decision.evidence += [] if job is None else kind.evidence(job, event, step.job)
    if submitted.claim is not None:
        decision.claims.append(submitted.claim)
    decision.moves_nodes |= machine.moves_nodes(job, event, step.job)
    if machine.is_snapshot_due(step.job, event):
        decision.snapshots.add(job_id)
    return ""
