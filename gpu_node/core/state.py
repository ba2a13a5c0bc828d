"""The state of a node: its link, its work, its worker and its memory, side by side."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import msgspec

from gpu_node.core.backoff import CAP_MS
from gpu_node.core.commands import Command, HandBack
from gpu_node.core.memory import Memory, Start
from gpu_node.core.update import Update
from hypergpu.ids import JobId, NodeId
from hypergpu.statements.assignment import Assignment, Lease
from hypergpu.units import Milliseconds

DRAIN_LIMIT_MS = Milliseconds(25_000)
RESTARTS_MAX = 3
FIRST_PROGRESS_LIMIT_MS = Milliseconds(600_000)
PROGRESS_LIMIT_MS = Milliseconds(120_000)


class Patience(msgspec.Struct, frozen=True):
    """How long a training may show no progress before its worker counts as hanging."""

    first_ms: Milliseconds = FIRST_PROGRESS_LIMIT_MS
    """Before the first sign of progress: data is loaded and kernels are compiled."""
    later_ms: Milliseconds = PROGRESS_LIMIT_MS
    """After it; longer where inner steps are slow."""


PATIENCE = Patience()


class Connection(Enum):
    """Where the link is. Work goes on in each but LEFT."""

    DOWN = "down"  # the daemon has not started
    JOINING = "joining"
    JOIN_WAITING = "waiting to join"
    CONNECTING = "connecting"
    WAITING = "waiting to connect"
    CONNECTED = "connected"
    LEFT = "left"


class Link(msgspec.Struct, frozen=True):
    """The link to the coordinator."""

    connection: Connection = Connection.DOWN
    since_ms: Milliseconds = Milliseconds(0)
    attempt: int = 0
    """Attempts in a row that did not last."""
    retry_at_ms: Milliseconds = Milliseconds(0)
    reason: str = ""
    """Why it is not connected, for people."""
    quick_until_ms: Milliseconds = Milliseconds(0)
    """A good link broke within the last minute: until then waits are short."""


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do."""


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """The model and the data are on their way."""

    assignment: Assignment
    start: Start
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)
    """0: under way, or waiting for the link."""


class Training(msgspec.Struct, frozen=True, tag=True):
    """The inputs are there; the worker trains, or will once it is free and well."""

    assignment: Assignment
    start: Start


class Uploading(msgspec.Struct, frozen=True, tag=True):
    """The update is finished and on its way."""

    assignment: Assignment
    update: Update
    attempt: int = 0
    retry_at_ms: Milliseconds = Milliseconds(0)
    """When it is tried again, or for the first time; 0: under way, or waiting for the link."""


Work = Idle | Fetching | Training | Uploading


class Pulse(msgspec.Struct, frozen=True):
    """What the training at hand has shown of itself."""

    at_ms: Milliseconds = Milliseconds(0)
    """Of its start, or of the last progress."""
    steps_done: int = 0
    slowest_step_ms: Milliseconds = Milliseconds(0)


class Worker(msgspec.Struct, frozen=True):
    """The process that trains, as far as the node knows."""

    busy: Lease | None = None
    """What it is training, which an aborted shard remains until the worker confirms."""
    deaths: int = 0
    """Under the current assignment."""
    false_starts: int = 0
    """Starts in a row that never got ready."""
    retry_at_ms: Milliseconds = Milliseconds(0)
    """It rests until then; 0: it does not."""
    pulse: Pulse = Pulse()

    def renewed(self) -> "Worker":
        """The worker for other work, which starts with a clean slate."""
        return Worker(busy=self.busy, false_starts=self.false_starts)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node knows. Only `memory` outlives the daemon."""

    node: NodeId
    memory: Memory = Memory()
    link: Link = Link()
    work: Work = Idle()
    queue: tuple[Assignment, ...] = ()
    """Work of other jobs, in order of arrival, at most one each."""
    worker: Worker = Worker()
    declined: dict[JobId, HandBack] = {}
    """The last work handed back of each job: it is not taken up again."""
    owed: tuple[HandBack, ...] = ()
    """Hand-backs to send once the link is there."""
    releasing: frozenset[JobId] = frozenset()
    """Jobs whose state is deleted as soon as the worker lets go of them."""
    drain: str = ""
    """Why the node is leaving; empty while it stays."""
    unhealthy: str = ""
    """Why no worker gets ready here; empty once one does."""
    drain_limit_ms: Milliseconds = DRAIN_LIMIT_MS
    reconnect_cap_ms: Milliseconds = CAP_MS
    patience: Patience = PATIENCE

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator hears the node."""
        return self.link.connection is Connection.CONNECTED

    @property
    def current(self) -> Assignment | None:
        """What is being worked on."""
        return None if isinstance(self.work, Idle) else self.work.assignment


class Step(NamedTuple):
    """What a transition gives."""

    session: Session
    commands: tuple[Command, ...] = ()

    def then(self, advance: Callable[[Session], "Step"]) -> "Step":
        """Go on from the session reached, keeping the commands given so far."""
        session, commands = advance(self.session)
        return Step(session, self.commands + commands)


replace = msgspec.structs.replace
"""A copy of a struct with some fields changed."""
