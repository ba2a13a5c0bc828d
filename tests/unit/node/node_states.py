"""Sessions in each state, reached by events alone, and the events to try on them."""

from collections.abc import Iterable

from gpu_node.core.events import (
    Connected,
    DrainRequested,
    FetchBroken,
    FetchRejected,
    InputsFetched,
    JobReleased,
    Joined,
    JoinFailed,
    JoinRejected,
    LinkLost,
    LinkRejected,
    NodeEvent,
    ShardAssigned,
    ShardCancelled,
    Started,
    StopRequested,
    Timer,
    TimerFired,
    TrainingAborted,
    TrainingFailed,
    TrainingFinished,
    TrainingProgressed,
    UploadAccepted,
    UploadBroken,
    UploadLate,
    UploadRejected,
    WorkerDied,
    WorkerReady,
)
from gpu_node.core.session import transition
from gpu_node.core.state import NodeSession, SessionStep
from gpu_node.core.update import TrainedUpdate
from hypergpu.ids import Digest, JobId, NodeId, Slot
from hypergpu.statements.assignment import Assignment, BlobRef, Lease, SampleRange, Task
from hypergpu.units import Bytes, Milliseconds, Samples

NODE = NodeId("0x" + "a1" * 20)
JOB = JobId("job-000000000001")
OTHER_JOB = JobId("job-000000000002")


def at(ms: int) -> Milliseconds:
    return Milliseconds(ms)


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0"))


def lease(round_number: int = 3, number: int = 7, job: JobId = JOB) -> Lease:
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


def update(name: str = "update") -> TrainedUpdate:
    return TrainedUpdate(digest(name), Bytes(60), inner_steps=4, samples=Samples(32))


def after(session: NodeSession, events: Iterable[NodeEvent]) -> SessionStep:
    """The last step of several, with the commands of all."""
    step = SessionStep(session)
    for event in events:
        step = step.then(lambda reached, event=event: transition(reached, event))  # type: ignore[misc]
    return step


def reached(*events: NodeEvent) -> NodeSession:
    return after(NodeSession(node=NODE), events).session


CONNECT: tuple[NodeEvent, ...] = (
    Started(at_ms=at(0), has_certificate=True),
    Connected(at_ms=at(5)),
)
ASSIGN = ShardAssigned(at_ms=at(10), assignment=assignment())
FETCH = InputsFetched(at_ms=at(20), lease=lease())
TRAIN = TrainingFinished(at_ms=at(30), lease=lease(), update=update())
LOSE = LinkLost(at_ms=at(40), reason="reset")
DRAIN = DrainRequested(at_ms=at(40), reason="SIGTERM")
DIE = WorkerDied(at_ms=at(40), reason="signal 11")
NO_START = WorkerDied(at_ms=at(40), reason="no driver", was_ready=False)
OTHER = ShardAssigned(at_ms=at(12), assignment=assignment(lease(0, 2, OTHER_JOB)))
CANCEL = ShardCancelled(at_ms=at(40), lease=lease(), reason="closed")


def rests(session: NodeSession) -> TimerFired:
    """The worker's rest is over."""
    return TimerFired(at_ms=session.worker.retry_at_ms, timer=Timer.WORKER)


def about_to_give_up(death: WorkerDied) -> NodeSession:
    """In training under the last start of the worker that is granted."""
    session = reached(*CONNECT, ASSIGN, FETCH)
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
        "joining": reached(Started(at_ms=at(0), has_certificate=False)),
        "connecting": reached(*CONNECT[:1]),
        "idle": reached(*CONNECT),
        "idle, link lost": reached(*CONNECT, LOSE),
        "fetching": reached(*CONNECT, ASSIGN),
        "fetching, link lost": reached(*CONNECT, ASSIGN, LOSE),
        "fetching, other queued": reached(*CONNECT, ASSIGN, OTHER),
        "training": reached(*CONNECT, ASSIGN, FETCH),
        "training, worker failing": about_to_give_up(DIE),
        "training, link lost": reached(*CONNECT, ASSIGN, FETCH, LOSE),
        "training, other queued": reached(*CONNECT, ASSIGN, FETCH, OTHER),
        "training, worker resting": reached(*CONNECT, ASSIGN, FETCH, DIE),
        "training, draining": reached(*CONNECT, ASSIGN, FETCH, DRAIN),
        "aborting": reached(*CONNECT, ASSIGN, FETCH, CANCEL),
        "uploading": reached(*CONNECT, ASSIGN, FETCH, TRAIN),
        "uploading, link lost": reached(*CONNECT, ASSIGN, FETCH, TRAIN, LOSE),
        "uploading, draining": reached(*CONNECT, ASSIGN, FETCH, TRAIN, DRAIN),
        "unhealthy": unhealthy(),
        "left": reached(*CONNECT, DRAIN),
    }


def events() -> dict[str, NodeEvent]:
    """One event of each kind, and of some kinds the variants that differ, at one time, by name."""
    late, held = at(700_000), lease()
    timers: dict[str, NodeEvent] = {
        f"TimerFired {timer.value}": TimerFired(at_ms=late, timer=timer) for timer in Timer
    }
    return {
        "Started": Started(at_ms=late, has_certificate=True),
        "Started, no certificate": Started(at_ms=late, has_certificate=False),
        "Joined": Joined(at_ms=late),
        "JoinFailed": JoinFailed(at_ms=late, reason="unreachable"),
        "JoinRejected": JoinRejected(at_ms=late, reason="token expired"),
        "Connected": Connected(at_ms=late),
        "LinkLost": LinkLost(at_ms=late, reason="reset"),
        "LinkRejected": LinkRejected(at_ms=late, reason="upgrade"),
        "ShardAssigned, again": ShardAssigned(at_ms=late, assignment=assignment()),
        "ShardAssigned, new lease": ShardAssigned(at_ms=late, assignment=assignment(lease(3, 8))),
        "ShardAssigned, next round": ShardAssigned(at_ms=late, assignment=assignment(lease(4, 9))),
        "ShardAssigned, other job": ShardAssigned(
            at_ms=late, assignment=assignment(lease(0, 2, OTHER_JOB))
        ),
        "ShardCancelled": ShardCancelled(at_ms=late, lease=held, reason="closed"),
        "JobReleased": JobReleased(at_ms=late, job_id=JOB, reason="over"),
        "InputsFetched": InputsFetched(at_ms=late, lease=held),
        "FetchBroken": FetchBroken(at_ms=late, lease=held, reason="reset"),
        "FetchRejected": FetchRejected(at_ms=late, lease=held, reason="unknown blob"),
        "TrainingFinished": TrainingFinished(at_ms=late, lease=held, update=update()),
        "TrainingFailed": TrainingFailed(at_ms=late, lease=held, reason="no such workload"),
        "TrainingAborted": TrainingAborted(at_ms=late, lease=held),
        "TrainingProgressed": TrainingProgressed(at_ms=late, lease=held, steps_done=2),
        "WorkerReady": WorkerReady(at_ms=late),
        "WorkerDied": WorkerDied(at_ms=late, reason="signal 11"),
        "WorkerDied, never ready": WorkerDied(at_ms=late, reason="driver", was_ready=False),
        "UploadAccepted": UploadAccepted(at_ms=late, lease=held),
        "UploadLate": UploadLate(at_ms=late, lease=held, reason="round closed"),
        "UploadRejected": UploadRejected(at_ms=late, lease=held, reason="not finite"),
        "UploadBroken": UploadBroken(at_ms=late, lease=held, reason="reset"),
        **timers,
        "DrainRequested": DrainRequested(at_ms=late, reason="SIGTERM"),
        "StopRequested": StopRequested(at_ms=late, reason="SIGTERM"),
    }
