"""The demo's cluster, a watched job on it, and what is killed in its course."""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hypergpu.errors import Reason
from hypergpu.journal.events import UpdateReceivedEvent
from hypergpu.user.client import Coordinator, HyperGPUError, JobEvent
from hypergpu.user.client.history import History
from hypergpu.user.cluster.cluster import LocalCluster
from hypergpu.user.terminal.watch import JobProgress, Watched, open_view

GIVE_UP_AFTER_S = 300.0
PAUSED_AT_MOST_S = 10.0
"""Time after which a job that paused itself is given up."""
AWAY_S = 1.0
HOLD_PERCENT = 35
"""Share of the work after which the job waits for the node that is not back yet.

On a busy machine a node that starts anew may miss the deadlines of its first rounds: enough are
left after these.
"""


class NodeReturn(NamedTuple):
    """Return of the killed node."""

    victim: str
    round: int
    """Counts from 1."""
    after_s: float
    """Time from its death to the first update accepted from it."""


class Fault(Protocol):
    """A fault that a job meets in its course."""

    is_paused: bool
    """Whether it was paused on purpose."""

    def dead(self) -> list[str]:
        """Programs that ended though they were not killed here."""
        ...

    def advance(self, events: Sequence[JobEvent], history: History) -> str:
        """Act if it is time; returns the action in words, or nothing."""
        ...


class ProgramsOwner(Protocol):
    """A cluster that knows which of its programs have ended."""

    def dead(self) -> list[str]:
        """Their names."""
        ...


class Undisturbed:
    """Nothing is done."""

    is_paused = False

    def __init__(self, cluster: ProgramsOwner) -> None:
        self.dead = cluster.dead

    def advance(self, events: Sequence[JobEvent], history: History) -> str:
        """See `Fault`."""
        return ""


class NodeFault:
    """Kills a node, starts it again, and keeps the job from ending before it has worked again."""

    def __init__(
        self, cluster: LocalCluster, coordinator: Coordinator, *, job_id: str, victim: str
    ) -> None:
        self._cluster = cluster
        self._coordinator = coordinator
        self._job_id = job_id
        self._victim = victim
        self._samples = coordinator.spec(job_id).stated_samples
        self._node_id = ""
        self._killed_at_s = 0.0
        self._is_away = False
        self.is_paused = False
        self.back: NodeReturn | None = None

    def _see(self, event: JobEvent) -> None:
        """Notice the node's return in the job's events."""
        update = event.content
        if self._is_away or self.back or not isinstance(update, UpdateReceivedEvent):
            return
        if self._node_id and update.node == self._node_id:
            after_s = time.monotonic() - self._killed_at_s
            self.back = NodeReturn(self._victim, update.round + 1, after_s)

    def dead(self) -> list[str]:
        """See `Fault`."""
        absent_names = {self._victim} if self._is_away else set()
        return [name for name in self._cluster.dead() if name not in absent_names]

    def advance(self, events: Sequence[JobEvent], history: History) -> str:
        """Kill, restart, pause or resume."""
        for event in events:
            self._see(event)
        done_samples = sum(each.samples for each in history.rounds)
        if not self._node_id:
            return self._kill() if 10 * done_samples >= 3 * self._samples else ""
        if self._is_away:
            return self._restart() if time.monotonic() - self._killed_at_s >= AWAY_S else ""
        is_late = HOLD_PERCENT * self._samples <= 100 * done_samples < 100 * self._samples
        if self.back or not is_late or self.is_paused is not self._is_back():
            return ""
        self.is_paused = not self.is_paused
        if self.is_paused:
            self._coordinator.pause(self._job_id)
            return f"the job waits for {self._victim}"
        self._coordinator.resume(self._job_id)
        return f"{self._victim} is back: the job goes on"

    def _is_back(self) -> bool:
        """Whether the node is connected and its worker has started. It has no work yet where it was
        lost before: a paused job takes no nodes.
        """
        return self._coordinator.find_node(self._victim).state not in {"away", "starting"}

    def _kill(self) -> str:
        self._node_id = self._coordinator.find_node(self._victim).id
        self._is_away, self._killed_at_s = True, time.monotonic()
        return f"SIGKILL to {self._victim} (process {self._cluster.kill(self._victim)})"

    def _restart(self) -> str:
        self._is_away = False
        return f"{self._victim} started again (process {self._cluster.restart(self._victim)})"


class Demo(NamedTuple):
    """The cluster that everything is trained on."""

    cluster: LocalCluster
    coordinator: Coordinator
    names: list[str]
    """Names of the nodes."""


def follow(demo: Demo, job_id: str, title: str, fault: Fault | None = None) -> JobProgress:
    """Watch a job of the demo's cluster to its end; raises as `follow_job` does."""
    return follow_job(demo.coordinator, job_id, title, fault or Undisturbed(demo.cluster))


def follow_job(coordinator: Coordinator, job_id: str, title: str, fault: Fault) -> JobProgress:
    """Watch a job to its end.

    Raises:
        HyperGPUError: DEMO_MISSED, a program ended, or the job did not finish.
    """
    give_up_at_s = time.monotonic() + GIVE_UP_AFTER_S
    active_at_s = time.monotonic()
    with open_view(title=title) as view, Watched(coordinator, job_id, view) as job_watch:
        while not job_watch.has_ended:
            events = job_watch.tick()
            if text := fault.advance(events, job_watch.progress.history):
                job_watch.say(text)
            if dead := fault.dead():
                raise HyperGPUError(Reason.DEMO_MISSED, f"{dead[0]} ended by itself")
            job = job_watch.progress.job
            if job is None or job.phase != "paused" or fault.is_paused:
                active_at_s = time.monotonic()
            elif time.monotonic() - active_at_s > PAUSED_AT_MOST_S:
                raise HyperGPUError(Reason.DEMO_MISSED, f"the job paused itself: {job.reason}")
            if time.monotonic() > give_up_at_s:
                raise HyperGPUError(Reason.DEMO_MISSED, f"not done after {GIVE_UP_AFTER_S:.0f} s")
    job = job_watch.progress.job
    if job is None or job.phase != "finished":
        why = "unknown" if job is None else f"{job.phase}: {job.reason}"
        raise HyperGPUError(Reason.DEMO_MISSED, f"the job did not finish ({why})")
    return job_watch.progress
