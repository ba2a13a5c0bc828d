"""The state of a node: its link, its work, its worker. How it changes is decided in `work`, `link`
and `session`.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec

from gpu_node.core.backoff import CAP_MS
from gpu_node.core.commands import HandBack, NodeCommand
from gpu_node.core.events import TrainedUpdate
from gpu_node.core.memory import FRESH, Memory, TrainingStart
from hypergpu.assignment import AnyAssignment, Assignment, Lease, PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.ids import JobId, NodeId
from hypergpu.packed_work import PackedWork
from hypergpu.units import Milliseconds

RESTARTS_MAX = 3


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
    """What the work needs is being fetched, of a training the model and the data."""

    assignment: AnyAssignment
    start: TrainingStart = FRESH
    """Where a training starts."""
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)
    """0: under way, or waiting for the link."""


class Training(msgspec.Struct, frozen=True):
    """The inputs are there; the worker trains, or will once it is free and well."""

    assignment: Assignment
    start: TrainingStart


class Executing(msgspec.Struct, frozen=True):
    """As `Training`, of work of another kind."""

    assignment: PackedAssignment


class Uploading(msgspec.Struct, frozen=True):
    """The update is finished and being sent."""

    assignment: Assignment
    update: TrainedUpdate
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)
    """Time of the next attempt, or of the first; 0: under way, or waiting for the link."""


class Contributing(msgspec.Struct, frozen=True):
    """As `Uploading`, of work of another kind."""

    assignment: PackedAssignment
    result: PackedWork
    blob: BlobRef | None = None
    """Blob that the result names, to be sent before it."""
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)


Transferring = Fetching | Uploading | Contributing
"""Work at a transfer."""
Computing = Training | Executing
"""Work that is the worker's."""


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
    work: Idle | Transferring | Computing = Idle()
    next_work: Idle | Fetching | Executing | Contributing = Idle()
    """What comes after packed work at hand, of the same job; its result is sent after that one's.
    """
    queue: tuple[AnyAssignment, ...] = ()
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
    def current(self) -> AnyAssignment | None:
        """The assignment being worked on."""
        return None if isinstance(self.work, Idle) else self.work.assignment

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases of all that it has, in the order in which it does them."""
        works = (each for each in (self.work, self.next_work) if not isinstance(each, Idle))
        assignments = (*(work.assignment for work in works), *self.queue)
        return tuple(assignment.lease for assignment in assignments)

    @property
    def unsent_lease(self) -> Lease | None:
        """Lease of packed work at hand whose result is being sent; None: there is none."""
        return self.work.assignment.lease if isinstance(self.work, Contributing) else None

    @property
    def computing_work(self) -> Computing | None:
        """The work that is the worker's turn; None: there is none."""
        if isinstance(self.work, Computing):
            return self.work
        is_sending = isinstance(self.work, Contributing)
        return self.next_work if is_sending and isinstance(self.next_work, Executing) else None


class SessionStep(NamedTuple):
    """The session after an event, and the commands to perform."""

    session: NodeSession
    commands: tuple[NodeCommand, ...] = ()

    def then(self, advance: Callable[[NodeSession], "SessionStep"]) -> "SessionStep":
        """Go on from the session reached, keeping the commands given so far."""
        session, commands = advance(self.session)
        return SessionStep(session, self.commands + commands)
