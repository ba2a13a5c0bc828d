"""The state of a node, and the commands that its steps give: its link, its work, its worker, its
memory. Commands are imperative, keyed by lease and safe to perform twice; how a state changes is
decided in `work`, `link` and `session`.

The memory of a node: which end states it holds and which of their updates were accepted.

Theory. Training round ``r`` from the end state of round ``b`` computes, with error feedback ``e``,

    sent(r) = C(e(b) + delta(r))        e(r) = e(b) + delta(r) - sent(r)

so a sent update must reach the model or come back: the residual to start from is ``e(b) + sent(b)``
when ``sent(b)`` was rejected. That is decided when the job's next work arrives: an assignment names
the newest update that the coordinator accepted of this node, which was durable before it was named.
Two generations are kept, for a round that is assigned again starts from the end state before it,
never from its own.
"""

import hashlib
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec

from gpu_node.core.events import Timer, TrainedUpdate
from hypergpu.ids import JobId, NodeId, Slot
from hypergpu.statements import Assignment, Lease, Task
from hypergpu.units import Milliseconds

JOBS_MAX = 8
"""End states are as large as models: a node that misses releases must not fill its disk."""
ROUNDS_APART_MAX = 2
"""A residual older than this many rounds does more harm than good: training starts fresh."""


class TrainingStart(msgspec.Struct, frozen=True):
    """Where a training starts."""

    resume_from: int | None = None
    """Round of the end state; None: a fresh inner optimizer and an empty residual."""
    returns_update: bool = False
    """The update of that round was rejected and goes back into the residual."""


FRESH = TrainingStart()


class FinishedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A training that finished: its end state and its update lie on disk."""

    lease: Lease
    slot: Slot
    task: Task
    start: TrainingStart
    update: TrainedUpdate
    is_accepted: bool = False
    """Whether the coordinator accepted the update, as far as the node knows."""


class Memory(msgspec.Struct, frozen=True):
    """Everything a node must not forget when it restarts.

    At most two rounds of each job, the older first. The job worked on last comes last.
    """

    jobs: dict[JobId, tuple[FinishedRound, ...]] = {}

    def rounds(self, job_id: JobId) -> tuple[FinishedRound, ...]:
        """Finished rounds of a job, the older first; none for a job never seen."""
        return self.jobs.get(job_id, ())

    def with_rounds(self, job_id: JobId, rounds: tuple[FinishedRound, ...]) -> "Memory":
        """The memory in which these are the job's finished rounds."""
        others = {name: kept for name, kept in self.jobs.items() if name != job_id}
        return Memory({**others, job_id: rounds})

    def stale(self) -> frozenset[JobId]:
        """Jobs too many, longest not worked on first: their release never arrived."""
        return frozenset(tuple(self.jobs)[:-JOBS_MAX])


class WorkPlan(NamedTuple):
    """How to do an assignment's work."""

    memory: Memory
    """Memory with the outcome that the assignment names, without rounds that it made void."""
    start: TrainingStart
    finished: FinishedRound | None
    """The same work, done before: only its update is to be sent."""


def plan_work(memory: Memory, assignment: Assignment) -> WorkPlan:
    """Decide where an assignment's training starts, or that it is done already."""
    lease = assignment.lease
    rounds = memory.rounds(lease.job_id)
    earlier = _with_outcome(
        tuple(each for each in rounds if each.lease.round < lease.round), assignment
    )
    start = _start(earlier, lease.round)
    for end in rounds:
        if end.lease.round == lease.round and _is_same_work(end, assignment, earlier, start):
            finished = msgspec.structs.replace(end, lease=lease)
            return WorkPlan(memory.with_rounds(lease.job_id, (*earlier, finished)), start, finished)
    return WorkPlan(memory.with_rounds(lease.job_id, earlier), start, None)


def _with_outcome(
    earlier: tuple[FinishedRound, ...], assignment: Assignment
) -> tuple[FinishedRound, ...]:
    """Set whether the newest update was accepted; the assignment outweighs an earlier answer."""
    if not earlier:
        return earlier
    newest = earlier[-1]
    is_accepted = newest.update.digest == assignment.last_accepted
    return (*earlier[:-1], msgspec.structs.replace(newest, is_accepted=is_accepted))


def _start(earlier: tuple[FinishedRound, ...], round_number: int) -> TrainingStart:
    if not earlier or round_number - earlier[-1].lease.round > ROUNDS_APART_MAX:
        return FRESH
    return TrainingStart(earlier[-1].lease.round, not earlier[-1].is_accepted)


def _is_same_work(
    end: FinishedRound,
    assignment: Assignment,
    earlier: tuple[FinishedRound, ...],
    start: TrainingStart,
) -> bool:
    if end.slot != assignment.slot or end.task != assignment.task:
        return False
    # The outcome of the update before may be another one by now; then this round is void.
    return not earlier or end.start == start


def with_finished(
    memory: Memory, assignment: Assignment, start: TrainingStart, update: TrainedUpdate
) -> Memory:
    """Remember a training that finished, and the one end state that a rollback of it needs."""
    job_id = assignment.lease.job_id
    end = FinishedRound(
        lease=assignment.lease,
        slot=assignment.slot,
        task=assignment.task,
        start=start,
        update=update,
    )
    origin = tuple(each for each in memory.rounds(job_id) if each.lease.round == start.resume_from)
    return memory.with_rounds(job_id, (*origin, end))


def with_accepted(memory: Memory, lease: Lease) -> Memory:
    """Remember that the update under ``lease`` was accepted."""
    rounds = tuple(
        msgspec.structs.replace(end, is_accepted=True) if end.lease == lease else end
        for end in memory.rounds(lease.job_id)
    )
    return memory.with_rounds(lease.job_id, rounds)


def without_jobs(memory: Memory, job_ids: frozenset[JobId]) -> Memory:
    """Forget jobs."""
    return Memory({name: job for name, job in memory.jobs.items() if name not in job_ids})


class NodeCommand(msgspec.Struct, frozen=True):
    """A command to the shell."""


class Departure(Enum):
    """How a daemon ends."""

    DRAINED = "drained"
    STOPPED = "stopped"
    REJECTED = "rejected"


class Join(NodeCommand, frozen=True):
    """Trade the token for a certificate; answered by `Joined`, `JoinFailed` or `JoinRejected`."""


class OpenLink(NodeCommand, frozen=True):
    """Dial and open the control stream; answered by `Connected`, `LinkLost` or `LinkRejected`."""

    working: tuple[Lease, ...]
    """Leases that the hello names as still being worked on."""


class FetchInputs(NodeCommand, frozen=True):
    """Fetch the model and the data; answered by `InputsFetched`, `FetchBroken` or `FetchRejected`.

    Nothing happens when that is under way for this lease already.
    """

    assignment: Assignment


class StopTransfer(NodeCommand, frozen=True):
    """Stop the download or the upload of a lease. Bytes that arrived stay where they are."""

    lease: Lease


class StartTraining(NodeCommand, frozen=True):
    """Train a shard.

    Answered by `TrainingFinished`, `TrainingFailed`, `TrainingAborted` or `WorkerDied`.
    """

    assignment: Assignment
    start: TrainingStart
    kept_rounds: tuple[int, ...]
    """Rounds whose end states to keep. Others on disk were never finished and are deleted."""


class AbortTraining(NodeCommand, frozen=True):
    """Tell the worker to drop a shard, and end it should it not answer."""

    lease: Lease


class StartWorker(NodeCommand, frozen=True):
    """Start the worker without work; answered by `WorkerReady` or `WorkerDied`."""


class EndWorker(NodeCommand, frozen=True):
    """End the worker process at once; answered by `WorkerDied`."""

    reason: str


class SendUpdate(NodeCommand, frozen=True):
    """Send an update; answered by `UploadAccepted`, `UploadLate`, `UploadRejected`, `UploadBroken`.

    Nothing happens when that is under way for this lease already.
    """

    assignment: Assignment
    """The work, under its newest lease."""
    update: TrainedUpdate


class HandBack(NodeCommand, frozen=True):
    """Tell the coordinator that a lease's work will not be done."""

    lease: Lease
    reason: str


class AnnounceDraining(NodeCommand, frozen=True):
    """Tell the coordinator that this node takes nothing more."""

    reason: str


class DeleteJobState(NodeCommand, frozen=True):
    """Delete what the node keeps for a job."""

    job_id: JobId


class SetTimer(NodeCommand, frozen=True):
    """Report `TimerFired` at this time. It replaces a timer of the same name."""

    timer: Timer
    at_ms: Milliseconds


class Leave(NodeCommand, frozen=True):
    """Close the link in good order, end the worker and exit."""

    departure: Departure
    reason: str


FIRST_MS = 200
CAP_MS = Milliseconds(30_000)
QUICK_CAP_MS = Milliseconds(1_500)
"""The longest wait while a good link has only just broken: a link that is there again is to be in
use within two seconds, greeting included."""
QUICK_MS = 60_000
QUICK_ATTEMPT_MAX = 4
"""200 ms << 4 is over the quick cap; waits grow from there once the quick minute is over."""
_DOUBLINGS_MAX = 8  # 200 ms << 8 is over the cap


def backoff_ms(key: str, attempt: int, cap_ms: Milliseconds = CAP_MS) -> Milliseconds:
    """Wait before retry number ``attempt`` (0 is the first).

    The wait is in [0.5, 1) of ``200 ms * 2**attempt``, at most of ``cap_ms``. Where it falls is a
    hash of ``key`` and ``attempt``, so that a thousand nodes cut off together do not come back
    together and a simulation repeats itself.
    """
    whole_ms = min(cap_ms, FIRST_MS << min(attempt, _DOUBLINGS_MAX))
    half_ms = whole_ms // 2
    return Milliseconds(half_ms + chosen_ms(f"{key}/{attempt}", half_ms))


def chosen_ms(key: str, below_ms: int) -> Milliseconds:
    """A time in [0, ``below_ms``), the same for the same ``key``."""
    seed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return Milliseconds(int.from_bytes(seed, "big") % below_ms)


RESTARTS_MAX = 3
replace = msgspec.structs.replace
"""A copy of a struct with some fields changed."""


class StallTimeouts(msgspec.Struct, frozen=True):
    """How long a training may show no progress before its worker counts as hanging."""

    first_ms: Milliseconds = Milliseconds(600_000)
    """Before the first sign of progress: data is loaded and kernels are compiled."""
    later_ms: Milliseconds = Milliseconds(120_000)
    """After it; longer where inner steps are slow."""


class LinkPhase(Enum):
    """Where the link is. Work goes on in each phase but LEFT."""

    DOWN = "down"  # the daemon has not started
    JOINING = "joining"
    JOIN_WAITING = "waiting to join"
    CONNECTING = "connecting"
    WAITING = "waiting to connect"
    CONNECTED = "connected"
    LEFT = "left"


class CoordinatorLink(msgspec.Struct, frozen=True):
    """The link to the coordinator."""

    phase: LinkPhase = LinkPhase.DOWN
    since_ms: Milliseconds = Milliseconds(0)
    attempt: int = 0
    """Attempts in a row that did not last."""
    retry_at_ms: Milliseconds = Milliseconds(0)
    reason: str = ""
    """Why it is not connected, for people."""
    quick_until_ms: Milliseconds = Milliseconds(0)
    """A good link broke within the last minute: until then waits are short."""
    silent_dials: int = 0
    """Dials since the last greeting that nobody answered in time."""


class Idle(msgspec.Struct, frozen=True):
    """Nothing to do."""


class Fetching(msgspec.Struct, frozen=True):
    """The model and the data are being fetched."""

    assignment: Assignment
    start: TrainingStart
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)
    """0: under way, or waiting for the link."""


class Training(msgspec.Struct, frozen=True):
    """The inputs are there; the worker trains, or will once it is free and well."""

    assignment: Assignment
    start: TrainingStart


class Uploading(msgspec.Struct, frozen=True):
    """The update is finished and being sent."""

    assignment: Assignment
    update: TrainedUpdate
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)
    """Time of the next attempt, or of the first; 0: under way, or waiting for the link."""


class ProgressRecord(msgspec.Struct, frozen=True):
    """Progress of the training at hand."""

    at_ms: Milliseconds = Milliseconds(0)
    """Time of the last progress; before any, of the training's start."""
    steps_done: int = 0
    slowest_step_ms: Milliseconds = Milliseconds(0)


class WorkerState(msgspec.Struct, frozen=True):
    """The process that trains, as far as the node knows."""

    busy: Lease | None = None
    """Lease that it trains, an aborted one included until the worker confirms."""
    deaths: int = 0
    """Deaths under the current assignment."""
    false_starts: int = 0
    """Starts in a row that never got ready."""
    retry_at_ms: Milliseconds = Milliseconds(0)
    """It is not started again before; 0: no wait."""
    progress: ProgressRecord = ProgressRecord()

    def for_other_work(self) -> "WorkerState":
        """The state without the deaths and progress of the work so far."""
        return WorkerState(busy=self.busy, false_starts=self.false_starts)


class NodeSession(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node knows. Only `memory` outlives the daemon."""

    node: NodeId
    memory: Memory = Memory()
    link: CoordinatorLink = CoordinatorLink()
    work: Idle | Fetching | Training | Uploading = Idle()
    queue: tuple[Assignment, ...] = ()
    """Work of other jobs, in order of arrival, at most one each."""
    worker: WorkerState = WorkerState()
    declined: dict[JobId, HandBack] = {}
    """The last work handed back of each job: it is not taken up again."""
    owed: tuple[HandBack, ...] = ()
    """Hand-backs to send once the link is there."""
    releasing: frozenset[JobId] = frozenset()
    """Jobs whose state is deleted as soon as the worker no longer trains them."""
    drain: str = ""
    """Why the node is leaving; empty while it stays."""
    unhealthy: str = ""
    """Why no worker gets ready here; empty once one does."""
    withheld: str = ""
    """Why the owner's limits let the node do nothing now; empty while they let it work."""
    drain_limit_ms: Milliseconds = Milliseconds(25_000)
    reconnect_cap_ms: Milliseconds = CAP_MS
    stall_timeouts: StallTimeouts = StallTimeouts()

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator hears the node."""
        return self.link.phase is LinkPhase.CONNECTED

    @property
    def current(self) -> Assignment | None:
        """The assignment being worked on."""
        return None if isinstance(self.work, Idle) else self.work.assignment


class SessionStep(NamedTuple):
    """The session after an event, and the commands to perform."""

    session: NodeSession
    commands: tuple[NodeCommand, ...] = ()

    def then(self, advance: Callable[[NodeSession], "SessionStep"]) -> "SessionStep":
        """Go on from the session reached, keeping the commands given so far."""
        session, commands = advance(self.session)
        return SessionStep(session, self.commands + commands)
