"""A served model among nodes that come, go and hand back: its journal by a seed."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from benchmarks.ours.metering.host import COORDINATOR
from coordinator.core.serving.events import (
    AnswerChecked,
    CheckUndecided,
    CountsClosed,
    ModelUnloaded,
    ModelWanted,
    ReplicaHandedBack,
    ServeCreated,
    SettlementDue,
    VersionPublished,
    WindowCounted,
    WindowSigned,
)
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import CountedWindow, ServeJob, ServePhase
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import StampedEvent
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.ledger_terms import Domain, Terms, terms_of
from hypergpu.result_statements import CountStatement, count_contribution
from hypergpu.serving.calls import CheckFigures
from hypergpu.serving.serve_request import TUNED_KIND, ServeRequest
from hypergpu.serving.tuned_model import ModelVersion, Tuning, TuningSource
from hypergpu.statements import SignedContribution
from hypergpu.token_counts import TokenCount
from hypergpu.units import Bytes, Milliseconds
from hypergpu.work_units import WorkUnit

_NOW = Milliseconds(0)
_STEP_MS_MOST = 4_000
BASE = {"base.index": BlobRef(digest_of(b"index"), Bytes(100))}


_ADAPTER = BlobRef(digest_of(b"adapter"), Bytes(50))
TUNING = Tuning(
    job=JobId("job-t"),
    workload="hf-causal-lm",
    options={},
    layout=BlobRef(digest_of(b"layout"), Bytes(10)),
    version=ModelVersion(1, _ADAPTER),
    follows=True,
)


class ServeWalk(NamedTuple):
    """What a walk left behind."""

    jobs: tuple[ServeJob, ...]
    """The job after each event."""
    journal: tuple[StampedEvent, ...]
    """The events that were submitted, and the records that followed from each."""


def created_model(
    job_id: str = "job-s", *, has_receipts: bool = False, follows: bool = False, **request: Any
) -> ServeCreated:
    """The first event of a job, which follows a training or is what its files are."""
    files: dict[str, Any] = {"files": BASE}
    if follows:
        source = TuningSource(job=TUNING.job, follows=True)
        files = {"files": {}, "engine": TUNED_KIND, "source": source}
    serve_request = replace(ServeRequest(model="tiny", **files), **request)
    serve_request.check()
    terms = terms_of(COORDINATOR.address, JobId(job_id), Domain(), WorkUnit.TOKENS)
    return ServeCreated(
        terms=terms if has_receipts else Terms(),
        at_ms=_NOW,
        job_id=JobId(job_id),
        owner=TokenId("token"),
        request=serve_request,
        model=serve_request.model,
        files=BASE if follows else {},
        tuning=TUNING if follows else None,
        training=TUNING.job if follows else "",
        rounds=TUNING.version.round if follows else 0,
    )


def signed_window(job: ServeJob, number: int, window: CountedWindow) -> WindowSigned:
    """The event of a node's signature, which the machine does not look at."""
    lease = Lease(job.job_id, number, window.lease)
    statement = CountStatement(lease, window.count.units, window.answers)
    contribution = count_contribution(job.terms, window.node, statement)
    claim = SignedContribution(contribution, b"signature")
    return WindowSigned(at_ms=job.at_ms, node=window.node, window=number, claim=claim)


def walk_by_seed(seed: int, events: int = 80) -> ServeWalk:
    """A walk of legal events."""
    draws = random.Random(seed)
    begin_event = created_model(
        replicas=draws.randint(1, 3), has_receipts=seed % 4 > 0, follows=seed % 2 > 0
    )
    job: ServeJob = SERVING.transition(None, begin_event).job
    jobs, at_ms = [job], 0
    journal: list[StampedEvent] = [begin_event]
    for _ in range(events):
        at_ms += draws.randint(1, _STEP_MS_MOST)
        legal = [each for each in _candidates(job, at_ms) if not SERVING.rejection(job, each)]
        if not legal:
            break
        event = draws.choice(legal)
        step = SERVING.transition(job, event)
        job = step.job
        jobs.append(job)
        records = (each.record for each in step.commands if isinstance(each, WriteRecord))
        journal.extend([event, *records])
    return ServeWalk(tuple(jobs), tuple(journal))


def _candidates(job: ServeJob, at_ms: int) -> Iterator[StampedEvent]:
    stamp: dict[str, Any] = {"at_ms": Milliseconds(at_ms)}
    for number in range(5):
        node = NodeId(f"0x{number:040x}")
        yield work_events.NodeJoined(node=node, **stamp)
        yield work_events.NodeLost(node=node, reason="silent", **stamp)
        yield work_events.NodeDraining(node=node, reason="its owner", **stamp)
        yield work_events.NodePaused(node=node, reason="its owner", **stamp)
        for is_lasting in (False, True):
            lease = job.leases[node].lease if node in job.leases else 0
            yield ReplicaHandedBack(
                node=node, lease=lease, reason="no memory", is_lasting=is_lasting, **stamp
            )
        yield WindowCounted(
            node=node,
            lease=job.leases[node].lease if node in job.leases else 1,
            count=TokenCount(at_ms % 7, at_ms % 100, 1),
            answers=digest_of(b"%d" % at_ms),
            salt="00",
            **stamp,
        )
        for checker in job.members:
            margin = (at_ms % 3) * 60_000
            yield AnswerChecked(
                node=node,
                checker=checker,
                answer=at_ms % 3,
                figures=CheckFigures(20, margin, 5, 5),
                **stamp,
            )
        yield CheckUndecided(node=node, answer=at_ms % 3, **stamp)
    for number, window in job.windows.items():
        yield signed_window(job, number, window)
    yield VersionPublished(rounds=at_ms % 40, blob=_ADAPTER, **stamp)
    yield ModelUnloaded(reason="nobody called for 5 minutes", **stamp)
    yield ModelWanted(**stamp)
    yield work_events.JobPaused(**stamp)
    if at_ms % 8 == 0:
        yield work_events.JobStopped(**stamp)
    yield CountsClosed(**stamp)
    if at_ms % 4 == 0:
        yield SettlementDue(**stamp)
    if job.phase is ServePhase.PAUSED:
        yield work_events.JobResumed(**stamp)
