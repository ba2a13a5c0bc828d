"""Sessions in each state, reached by events alone, and the events to try on them."""

from collections.abc import Iterable

from gpu_node.core import events
from gpu_node.core.events import TrainedUpdate
from gpu_node.core.session import transition
from gpu_node.core.session_state import NodeSession, SessionStep
from hypergpu.assignment import Assignment, Lease, PackedAssignment, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId, Slot
from hypergpu.packed_work import PackedWork
from hypergpu.units import Bytes, Milliseconds, Samples

NODE = NodeId("0x" + "a1" * 20)
SESSION_JOB = JobId("job-000000000001")
OTHER_JOB = JobId("job-000000000002")


def at(ms: int) -> Milliseconds:
    return Milliseconds(ms)


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0"))


def lease(round_number: int = 3, number: int = 7, job: JobId = SESSION_JOB) -> Lease:
    return Lease(job, round_number, number)


def task(round_number: int = 3, start: int = 0) -> Task:
    return Task(
        workload="digits-softmax",
        workload_version=1,
        inner_steps=4,
        batch_size=8,
        learning_rate=0.01,
        codec="int4",
        seed=round_number,
        ranges=(SampleRange(start, Samples(32)),),
        model=BlobRef(digest(f"model {round_number}"), Bytes(400)),
        layout=digest("layout"),
    )


def assignment(
    held: Lease | None = None, *, accepted: Digest | None = None, start: int = 0
) -> Assignment:
    held = held or lease()
    return Assignment(
        lease=held, slot=Slot(0), task=task(held.round, start), last_accepted=accepted
    )


def packed_assignment(
    held: Lease | None = None, body: bytes = b"first", after_lease: int = 0
) -> PackedAssignment:
    """Work of a kind that the session does not know."""
    work = PackedWork("other", body)
    return PackedAssignment(lease=held or lease(), slot=Slot(0), work=work, after_lease=after_lease)


def update(name: str = "update") -> TrainedUpdate:
    return TrainedUpdate(digest(name), Bytes(60), inner_steps=4, samples=Samples(32))


def after(session: NodeSession, events: Iterable[events.NodeEvent]) -> SessionStep:
    """The last step of several, with the commands of all."""
    step = SessionStep(session)
    for event in events:
        step = step.then(lambda reached, event=event: transition(reached, event))  # type: ignore[misc]
    return step


def reach(*events: events.NodeEvent) -> NodeSession:
    return after(NodeSession(node=NODE), events).session


CONNECT: tuple[events.NodeEvent, ...] = (
    events.Started(at_ms=at(0), has_certificate=True),
    events.Connected(at_ms=at(5)),
)
ASSIGN = events.ShardAssigned(at_ms=at(10), assignment=assignment())
FETCH = events.InputsFetched(at_ms=at(20), lease=lease())
TRAIN = events.TrainingFinished(at_ms=at(30), lease=lease(), update=update())
ASSIGN_PACKED = events.WorkAssigned(at_ms=at(10), assignment=packed_assignment())
FINISH_PACKED = events.WorkFinished(
    at_ms=at(30), lease=lease(), result=PackedWork("other", b"result")
)
NEXT_LEASE = lease(4, 8)
ASSIGN_NEXT = events.WorkAssigned(
    at_ms=at(22), assignment=packed_assignment(NEXT_LEASE, b"second", after_lease=7)
)
FETCH_NEXT = events.InputsFetched(at_ms=at(24), lease=NEXT_LEASE)
FINISH_NEXT = events.WorkFinished(
    at_ms=at(34), lease=NEXT_LEASE, result=PackedWork("other", b"second result")
)
EXECUTE = (*CONNECT, ASSIGN_PACKED, FETCH)
"""The worker is at packed work."""
LOSE = events.LinkLost(at_ms=at(40), reason="reset")
DRAIN = events.DrainRequested(at_ms=at(40), reason="SIGTERM")
WITHHOLD = events.AvailabilityChanged(at_ms=at(40), reason="hours")
DIE = events.WorkerDied(at_ms=at(40), reason="signal 11")
NO_START = events.WorkerDied(at_ms=at(40), reason="no driver", was_ready=False)
OTHER = events.ShardAssigned(at_ms=at(12), assignment=assignment(lease(0, 2, OTHER_JOB)))
CANCEL = events.ShardCancelled(at_ms=at(40), lease=lease(), reason="closed")


def rests(session: NodeSession) -> events.TimerFired:
    """The worker's rest is over."""
    return events.TimerFired(at_ms=session.worker.retry_at_ms, timer=events.Timer.WORKER)


def about_to_give_up(death: events.WorkerDied) -> NodeSession:
    """In training under the last start of the worker that is granted."""
    session = reach(*CONNECT, ASSIGN, FETCH)
    for _ in range(3):
        session = transition(session, death).session
        session = transition(session, rests(session)).session
    return session


def unhealthy() -> NodeSession:
    return transition(about_to_give_up(NO_START), NO_START).session


def states() -> dict[str, NodeSession]:
    """One session for each combination that matters, by name."""
    return {
        "down": NodeSession(node=NODE),
        "joining": reach(events.Started(at_ms=at(0), has_certificate=False)),
        "connecting": reach(*CONNECT[:1]),
        "idle": reach(*CONNECT),
        "idle, link lost": reach(*CONNECT, LOSE),
        "fetching": reach(*CONNECT, ASSIGN),
        "fetching, link lost": reach(*CONNECT, ASSIGN, LOSE),
        "fetching, other queued": reach(*CONNECT, ASSIGN, OTHER),
        "training": reach(*CONNECT, ASSIGN, FETCH),
        "training, worker failing": about_to_give_up(DIE),
        "training, link lost": reach(*CONNECT, ASSIGN, FETCH, LOSE),
        "training, other queued": reach(*CONNECT, ASSIGN, FETCH, OTHER),
        "training, worker resting": reach(*CONNECT, ASSIGN, FETCH, DIE),
        "training, draining": reach(*CONNECT, ASSIGN, FETCH, DRAIN),
        "aborting": reach(*CONNECT, ASSIGN, FETCH, CANCEL),
        "uploading": reach(*CONNECT, ASSIGN, FETCH, TRAIN),
        "uploading, link lost": reach(*CONNECT, ASSIGN, FETCH, TRAIN, LOSE),
        "uploading, draining": reach(*CONNECT, ASSIGN, FETCH, TRAIN, DRAIN),
        "executing": reach(*CONNECT, ASSIGN_PACKED, FETCH),
        "executing, link lost": reach(*CONNECT, ASSIGN_PACKED, FETCH, LOSE),
        "executing, resting": reach(*CONNECT, ASSIGN_PACKED, FETCH, DIE),
        "contributing": reach(*CONNECT, ASSIGN_PACKED, FETCH, FINISH_PACKED),
        "contributing, link lost": reach(*CONNECT, ASSIGN_PACKED, FETCH, FINISH_PACKED, LOSE),
        "contributing, draining": reach(*CONNECT, ASSIGN_PACKED, FETCH, FINISH_PACKED, DRAIN),
        "executing, next fetching": reach(*EXECUTE, ASSIGN_NEXT),
        "executing, next fetched": reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT),
        "contributing, next executing": reach(*EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED),
        "contributing, next done": reach(
            *EXECUTE, ASSIGN_NEXT, FETCH_NEXT, FINISH_PACKED, FINISH_NEXT
        ),
        "unhealthy": unhealthy(),
        "withheld": reach(*CONNECT, WITHHOLD),
        "uploading, withheld": reach(*CONNECT, ASSIGN, FETCH, TRAIN, WITHHOLD),
        "left": reach(*CONNECT, DRAIN),
    }


def all_events() -> dict[str, events.NodeEvent]:
    """One event of each kind, and of some kinds the variants that differ, at one time, by name."""
    late, held_lease = at(700_000), lease()
    timers: dict[str, events.NodeEvent] = {
        f"TimerFired {timer.value}": events.TimerFired(at_ms=late, timer=timer)
        for timer in events.Timer
    }
    return {
        "Started": events.Started(at_ms=late, has_certificate=True),
        "Started, no certificate": events.Started(at_ms=late, has_certificate=False),
        "Joined": events.Joined(at_ms=late),
        "JoinFailed": events.JoinFailed(at_ms=late, reason="unreachable"),
        "JoinRejected": events.JoinRejected(at_ms=late, reason="token expired"),
        "Connected": events.Connected(at_ms=late),
        "LinkLost": events.LinkLost(at_ms=late, reason="reset"),
        "LinkRejected": events.LinkRejected(at_ms=late, reason="upgrade"),
        "ShardAssigned, again": events.ShardAssigned(at_ms=late, assignment=assignment()),
        "ShardAssigned, new lease": events.ShardAssigned(
            at_ms=late, assignment=assignment(lease(3, 8))
        ),
        "ShardAssigned, next round": events.ShardAssigned(
            at_ms=late, assignment=assignment(lease(4, 9))
        ),
        "ShardAssigned, other job": events.ShardAssigned(
            at_ms=late, assignment=assignment(lease(0, 2, OTHER_JOB))
        ),
        "WorkAssigned, again": events.WorkAssigned(at_ms=late, assignment=packed_assignment()),
        "WorkAssigned, new lease": events.WorkAssigned(
            at_ms=late, assignment=packed_assignment(lease(3, 8), b"second")
        ),
        "WorkAssigned, comes after": events.WorkAssigned(
            at_ms=late, assignment=packed_assignment(lease(5, 9), b"third", after_lease=8)
        ),
        "ShardCancelled": events.ShardCancelled(at_ms=late, lease=held_lease, reason="closed"),
        "JobReleased": events.JobReleased(at_ms=late, job_id=SESSION_JOB, reason="over"),
        "InputsFetched": events.InputsFetched(at_ms=late, lease=held_lease),
        "FetchBroken": events.FetchBroken(at_ms=late, lease=held_lease, reason="reset"),
        "FetchRejected": events.FetchRejected(at_ms=late, lease=held_lease, reason="unknown blob"),
        "TrainingFinished": events.TrainingFinished(at_ms=late, lease=held_lease, update=update()),
        "WorkFinished": events.WorkFinished(
            at_ms=late, lease=held_lease, result=PackedWork("other", b"result")
        ),
        "TrainingFailed": events.TrainingFailed(
            at_ms=late, lease=held_lease, reason="no such workload"
        ),
        "TrainingAborted": events.TrainingAborted(at_ms=late, lease=held_lease),
        "TrainingProgressed": events.TrainingProgressed(at_ms=late, lease=held_lease, steps_done=2),
        "WorkerReady": events.WorkerReady(at_ms=late),
        "WorkerDied": events.WorkerDied(at_ms=late, reason="signal 11"),
        "WorkerDied, never ready": events.WorkerDied(at_ms=late, reason="driver", was_ready=False),
        "UploadAccepted": events.UploadAccepted(at_ms=late, lease=held_lease),
        "UploadLate": events.UploadLate(at_ms=late, lease=held_lease, reason="round closed"),
        "UploadRejected": events.UploadRejected(at_ms=late, lease=held_lease, reason="not finite"),
        "UploadBroken": events.UploadBroken(at_ms=late, lease=held_lease, reason="reset"),
        **timers,
        "AvailabilityChanged, away": events.AvailabilityChanged(at_ms=late, reason="hours"),
        "AvailabilityChanged, back": events.AvailabilityChanged(at_ms=late, reason=""),
        "DrainRequested": events.DrainRequested(at_ms=late, reason="SIGTERM"),
        "StopRequested": events.StopRequested(at_ms=late, reason="SIGTERM"),
    }
