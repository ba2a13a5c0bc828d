"""A served model among nodes that come, go and hand back: its journal by a seed."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.events import ReplicaHandedBack, ServeCreated
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work import work_events
from coordinator.core.work.work_events import StampedEvent
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.serving.serve_request import ServeRequest
from hypergpu.units import Bytes, Milliseconds

_NOW = Milliseconds(0)
_STEP_MS_MOST = 4_000
BASE = {"base.index": BlobRef(digest_of(b"index"), Bytes(100))}


class ServeWalk(NamedTuple):
    """What a walk left behind."""

    jobs: tuple[ServeJob, ...]
    """The job after each event."""
    journal: tuple[StampedEvent, ...]


def created_model(job_id: str = "job-s", **request: Any) -> ServeCreated:
    """The first event of a job."""
    serve_request = replace(ServeRequest(model="tiny", files=BASE), **request)
    serve_request.check()
    return ServeCreated(
        at_ms=_NOW,
        job_id=JobId(job_id),
        owner=TokenId("token"),
        request=serve_request,
        model=serve_request.model,
    )


def walk_by_seed(seed: int, events: int = 80) -> ServeWalk:
    """A walk of legal events."""
    draws = random.Random(seed)
    begin_event = created_model(replicas=draws.randint(1, 3))
    job: ServeJob = SERVING.transition(None, begin_event).job
    jobs, at_ms = [job], 0
    journal: list[StampedEvent] = [begin_event]
    for _ in range(events):
        at_ms += draws.randint(1, _STEP_MS_MOST)
        legal = [each for each in _candidates(job, at_ms) if not SERVING.rejection(job, each)]
        if not legal:
            break
        event = draws.choice(legal)
        job = SERVING.transition(job, event).job
        jobs.append(job)
        journal.append(event)
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
    yield work_events.JobPaused(**stamp)
    if job.phase is ServePhase.PAUSED:
        yield work_events.JobResumed(**stamp)
