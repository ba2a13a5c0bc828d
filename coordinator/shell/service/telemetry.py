"""Levels of nodes, told to whoever watches them as they change.

All watchers share one look at the nodes every half second. Each remembers the look by which it was
told a node's levels, and is told those that changed since: what it missed meanwhile is not kept, so
a watcher that reads slowly costs nothing. States and phases are looked at each time, readings and
steps of many nodes by turns.
"""

from coordinator.core.network.line import loss_share
from coordinator.core.network.reading import Estimate
from coordinator.core.training.assignment import plan_reason
from coordinator.core.training.job.state import ENDED, Phase
from coordinator.shell.kinds.training.demand import lacks_data
from coordinator.shell.kinds.training.job_runtime import JobRuntime, TrainingJobs, training_of
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.translate import health_message, participant_summary
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import job_pb2

LOOK_MS = 500
NODES_A_MESSAGE = 50
NODES_A_TURN = 50
FEW_NODES, TURNS_OF_SEVERAL = 12, 4
"""More nodes than these few are looked at in four turns at least: readings wander all the time, and
people see no more of it than every two seconds.
"""
_REASON_LENGTH_MAX = 300
_DIGITS, _HEALTH_DIGITS = 3, 2


def node_state(
    fleet: Fleet, jobs: TrainingJobs, node: NodeId, *, is_revoked: bool
) -> tuple[str, str]:
    """State of a node, and why it is in it."""
    nodes = fleet.nodes
    if is_revoked:
        return "revoked", "the operator revoked it"
    pause_reason = nodes.pause_reason(node)
    if node not in nodes.streams:
        return "away", f"it has no control stream{pause_reason and f', and is {pause_reason}'}"
    if reason := nodes.drain_reason(node):
        return "draining", reason
    if pause_reason:
        return "paused", pause_reason
    if fleet.readings.reading(node).is_starting:
        return "starting", "its worker is starting"
    runtime = fleet.allocator.runtime_of(node)
    if runtime is None:
        return "idle", _missing_data(fleet, jobs, node) or fleet.allocator.idle_reason(node)
    member = runtime.job.members.get(node)
    if member is not None and member.exclusion:
        fix = "; take it back: hypergpu node readmit" if member.ban else ""
        return "idle", f"{member.exclusion}{fix}"
    return "working", runtime.job.reason


def _missing_data(fleet: Fleet, jobs: TrainingJobs, node: NodeId) -> str:
    """The first job that the node is kept from by a data set that it lacks; empty: none."""
    reasons = (
        lacks_data(runtime.job, fleet.nodes, node)
        for runtime in jobs.values()
        if runtime.job.phase not in ENDED
    )
    return next(filter(None, reasons), "")


class NewestLevels:
    """Levels of all nodes as the last look found them."""

    def __init__(self, fleet: Fleet, jobs: TrainingJobs, known: KnownNodes) -> None:
        self._fleet = fleet
        self._jobs = jobs
        self._known = known
        self._levels: dict[NodeId, job_pb2.NodeLevels] = {}
        self._outlines: dict[NodeId, object] = {}
        self._changed_by: dict[NodeId, int] = {}
        """Number of the look that found each node's levels changed."""
        self._looks = 0
        self._looked_ms = Milliseconds(-LOOK_MS)

    def refresh(self, now_ms: Milliseconds) -> None:
        """Look at the nodes, unless that was done within the last half second."""
        if now_ms - self._looked_ms < LOOK_MS:
            return
        self._looked_ms = now_ms
        self._looks += 1
        nodes = self._known.revocations()
        least = TURNS_OF_SEVERAL if len(nodes) > FEW_NODES else 1
        turns = max(least, -(-len(nodes) // NODES_A_TURN))
        for place, (node, is_revoked) in enumerate(nodes.items()):
            outline = self._outline(node, is_revoked=is_revoked)
            if outline == self._outlines.get(node) and (place + self._looks) % turns:
                continue
            self._outlines[node] = outline
            levels = self._look(node, is_revoked=is_revoked)
            new_bytes = (
                levels.SerializeToString()
            )  # Of equal messages with a NaN the bytes are equal.
            if node not in self._levels or new_bytes != self._levels[node].SerializeToString():
                self._levels[node], self._changed_by[node] = levels, self._looks

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self._levels)

    def news(
        self, told: dict[NodeId, int], own: frozenset[NodeId] | None
    ) -> list[job_pb2.NodeLevels]:
        """Levels that a watcher was not told yet, of a message's worth of nodes.

        Args:
            told: By which look the watcher was told each node's levels; it is brought up to date.
            own: Nodes that the watcher may see; None: all.
        """
        news = []
        for node, look in self._changed_by.items():
            if told.get(node) != look and (own is None or node in own):
                told[node] = look
                news.append(self._levels[node])
                if len(news) == NODES_A_MESSAGE:
                    break
        return news

    def _outline(self, node: NodeId, *, is_revoked: bool) -> object:
        """Everything that is told at once when it changes."""
        fleet = self._fleet
        state = node_state(fleet, self._jobs, node, is_revoked=is_revoked)
        job_runtime = fleet.allocator.runtime_of(node)
        runtime = training_of(job_runtime)
        participant = runtime.job.participant(node) if runtime else None
        if runtime is None or participant is None:
            return state, job_runtime and job_runtime.job.job_id
        progress = fleet.nodes.progress.get(node)
        phase = progress.phase if progress and progress.lease == participant.lease else None
        number = runtime.job.round_of(participant)
        work = (runtime.job.phase, number, participant.lease, participant.work)
        return state[0], runtime.job.job_id, work, phase

    def _look(self, node: NodeId, *, is_revoked: bool) -> job_pb2.NodeLevels:
        fleet = self._fleet
        state, reason = node_state(fleet, self._jobs, node, is_revoked=is_revoked)
        levels = job_pb2.NodeLevels(node_id=node, state=state, reason=reason[:_REASON_LENGTH_MAX])
        health = fleet.health
        parts, exclusion = health.parts(node), health.exclusion(node)
        levels.health.CopyFrom(health_message(parts, exclusion, _HEALTH_DIGITS))
        reading = fleet.readings.reading(node)
        _set_mean(levels, "round_trip_us", reading.round_trip_us)
        if reading.round_trip_us.count:
            levels.round_trip_spread_us = _whole(reading.round_trip_us.deviation)
        for name in ("up_bits_per_s", "down_bits_per_s", "step_us"):
            _set_mean(levels, name, getattr(reading, name))
        if (loss := loss_share(reading)) is not None:
            levels.loss = _three_digits(loss)
        if (job_runtime := fleet.allocator.runtime_of(node)) is not None:
            levels.job_id = job_runtime.job.job_id
        if (runtime := training_of(job_runtime)) is not None:
            self._add_work(levels, node, runtime)
        return levels

    def _add_work(self, found: job_pb2.NodeLevels, node: NodeId, runtime: JobRuntime) -> None:
        job = runtime.job
        found.plan_reason = plan_reason(job, node)[:_REASON_LENGTH_MAX]
        participant = job.participant(node)
        if participant is None:
            return
        found.round = job.round_of(participant)
        progress = self._fleet.nodes.progress.get(node)
        found.participant.CopyFrom(participant_summary(node, participant, progress))
        found.participant.ClearField("reason")
        if job.phase is Phase.PAUSED:
            found.participant.ClearField("phase")


def _set_mean(found: job_pb2.NodeLevels, name: str, estimate: Estimate) -> None:
    if estimate.count:
        setattr(found, name, _whole(estimate.mean))


def _whole(value: float) -> int:
    return int(_three_digits(value))


def _three_digits(value: float) -> float:
    """A quantity to three digits: further ones are noise, and would be told all the time."""
    return float(f"{value:.{_DIGITS}g}")
