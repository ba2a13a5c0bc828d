"""The feed's state: a pure fold of journalled events and of levels that the coordinator tells.

Events are facts with a sequence number. Levels (summaries, progress, readings, accounts) are
conflated: only the newest counts. Equal inputs in the same order give equal changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dashboard_api.core.changes import Change, Draft, JsonObject
from dashboard_api.core.journal_fold import JobFold, JobMemory, node_names
from dashboard_api.core.lanes import continued_segments, is_paused, live_phase
from dashboard_api.core.state import ConnectionGap, EventLine, NodeState, PaymentsState, empty_state
from hypergpu.journal.events import RoundPlannedEvent
from hypergpu.journal.text import round_from_one
from hypergpu.user.client.values import (
    HealthView,
    JobEvent,
    JobView,
    NodeLevelsView,
    NodeView,
    ParticipantView,
)

SEEN_STEP_MS = 15_000
"""A node's time of last contact moves in steps of this: it would else change all the time."""
READING_DIGITS, HEALTH_DIGITS = 3, 2
_AWAY = "away"
_ABSENCES_KEPT = 20
_LIVE_STATES = frozenset({"pending"})
_SPEEDS = ("up_bits_per_s", "down_bits_per_s", "step_us")
_STATES_OF_PAUSE = frozenset({"paused", "starting", "idle", "working"})


class FeedProjection:
    """State of the feed with its changes since they were last taken."""

    def __init__(self, address: str, tree: JsonObject | None = None) -> None:
        self._draft = Draft(tree if tree is not None else empty_state(address))
        self._jobs: dict[str, JobFold] = {}
        self._levels: dict[str, NodeLevelsView] = {}
        """Newest levels of nodes. What they tell of a round may come before its events."""

    @property
    def state(self) -> JsonObject:
        """The state as a JSON tree; read it, never write it."""
        return self._draft.tree

    def take_changes(self) -> list[Change]:
        """Changes since the last call, in order."""
        return self._draft.take_changes()

    def memory(self, job_id: str) -> JobMemory:
        """Facts about a job that the feed does not show."""
        return self._job(job_id).memory

    def take_event(self, job_id: str, event: JobEvent, at_ms: int) -> EventLine:
        """Fold a journalled event; returns it in a sentence.

        Args:
            job_id: The job whose journal has it.
            event: As journalled.
            at_ms: Its time on the wall clock.
        """
        fold = self._job(job_id)
        round_before = fold.memory.open_round
        fold.take_event(event, at_ms)
        is_plan = isinstance(event.content, RoundPlannedEvent)
        if is_plan or fold.memory.open_round != round_before:
            for each in self._levels.values():
                if each.job == job_id:
                    _take_work(fold, each, at_ms)
        return fold.event_line(event, at_ms)

    def take_reachability(self, reason: str, at_ms: int, *, is_reachable: bool) -> None:
        """State whether the coordinator answers."""
        reachability = {"is_reachable": is_reachable, "reason": reason}
        before = self._draft.get("coordinator") or {}
        if any(before.get(name) != value for name, value in reachability.items()):
            self._draft.set_each(("coordinator",), {**reachability, "at_ms": at_ms})

    def take_jobs(self, jobs: Sequence[JobView]) -> None:
        """Fold the summaries of all jobs; a job that is not among them is gone."""
        present = {job.id for job in jobs}
        for job_id in set(self._draft.get("jobs") or {}) - present:
            self._draft.drop(("jobs", job_id))
            self._jobs.pop(job_id, None)
        for job in jobs:
            fold = self._job(job.id)
            fold.set(**_summary(job))
            if job.bundles is not None:
                fold.farm.take_levels(job.bundles)

    def take_levels(self, levels: Sequence[NodeLevelsView], at_ms: int) -> None:
        """Fold what changed about nodes; of one that no list named yet, its work alone."""
        for each in levels:
            self._levels[each.id] = each
            path = ("nodes", each.id)
            if self._draft.get(*path) is not None:
                self._note_absence(path, each.state, at_ms)
                self._draft.set_each(path, _level_values(each))
            if each.job in self._jobs:
                _take_work(self._jobs[each.job], each, at_ms)

    def _note_absence(self, path: tuple[str, ...], state: str, at_ms: int) -> None:
        """Note when a node's connection ends, and when it is back."""
        is_away = state == _AWAY
        was_away = self._draft.get(*path, "state") == _AWAY
        absences = self._draft.get(*path, "absences") or []
        if is_away and not was_away:
            new_gap = msgspec.to_builtins(ConnectionGap(at_ms))
            self._draft.append((*path, "absences"), [new_gap], keep=_ABSENCES_KEPT)
        elif was_away and not is_away and absences:
            ended_gap = {**absences[-1], "to_ms": at_ms}
            self._draft.set((*path, "absences"), [*absences[:-1], ended_gap])

    def forget_levels(self) -> None:
        """Let lists of nodes tell levels again: nobody else does now."""
        self._levels.clear()

    def take_nodes(self, nodes: Sequence[NodeView], now_ms: int) -> None:
        """Fold the readings of all nodes; a node that is not among them is gone."""
        self.drop_nodes_but([node.id for node in nodes])
        self.take_readings(nodes, now_ms)

    def drop_nodes_but(self, present: Sequence[str]) -> None:
        """Drop the nodes that are gone."""
        for node_id in sorted(set(self._draft.get("nodes") or {}) - set(present)):
            self._draft.drop(("nodes", node_id))

    def take_readings(self, nodes: Sequence[NodeView], now_ms: int) -> None:
        """Fold the readings of some nodes."""
        for node in nodes:
            path = ("nodes", node.id)
            if self._draft.get(*path) is None:
                self._draft.set(path, msgspec.to_builtins(NodeState(id=node.id)))
            values = _node_values(node, now_ms)
            if node.id in self._levels:
                # They are newer than a list that may have been under way.
                values |= _level_values(self._levels[node.id])
            seen_ms = self._draft.get(*path, "seen_at_ms")
            is_new = seen_ms is None or values["seen_at_ms"] - seen_ms >= SEEN_STEP_MS
            if not is_new and values["state"] == self._draft.get(*path, "state"):
                del values["seen_at_ms"]
            self._draft.set_each(path, values)

    def take_payments(self, job_id: str, payments: PaymentsState, decimals: int) -> None:
        """Fold the accounts of a job."""
        fold = self._job(job_id)
        before = fold.get("payments")
        values: JsonObject = msgspec.to_builtins(payments)
        if before is None:
            fold.set(payments=values)
        else:
            self._draft.set_each((*fold.path, "payments"), values)
        fold.set(decimals=decimals)
        for node in payments.nodes:
            if self._draft.get("nodes", node) is not None:
                self._draft.set(("nodes", node, "earned"), str(self._earnings(node)))

    def take_alerts(self, alerts: Mapping[str, Any]) -> None:
        """Fold the alerts that stand now."""
        for alert_id in set(self._draft.get("alerts") or {}) - set(alerts):
            self._draft.drop(("alerts", alert_id))
        for alert_id, alert in alerts.items():
            self._draft.set(("alerts", alert_id), alert)

    def names(self) -> dict[str, str]:
        """Owners' names of machines, by node."""
        return node_names(self._draft)

    def _job(self, job_id: str) -> JobFold:
        if job_id not in self._jobs:
            self._jobs[job_id] = JobFold(self._draft, job_id)
        return self._jobs[job_id]

    def _earnings(self, node: str) -> int:
        accounts = [job.get("payments") for job in (self._draft.get("jobs") or {}).values()]
        own = [each["nodes"].get(node) for each in accounts if each]
        return sum(int(each["worth"]) for each in own if each)


def _summary(job: JobView) -> JsonObject:
    """Figures of a job that its coordinator adds up."""
    values: JsonObject = {
        name: getattr(job, name)
        for name in (
            *("name", "phase", "reason", "round", "rounds", "nodes", "metric_name", "model"),
            *("bytes_up", "bytes_down", "updates_accepted", "samples"),
        )
    }
    values["reason"] = round_from_one(job.reason)
    values["updates_rejected"] = job.updates_rejected
    # Losses of evaluations come with their events; the summary knows them after a restart, too.
    values |= {name: v for name in ("loss", "metric") if (v := getattr(job, name)) is not None}
    return values


def _level_values(levels: NodeLevelsView) -> JsonObject:
    names = ("state", "reason", "job", "plan_reason", "loss", *_SPEEDS)
    values = {name: getattr(levels, name) for name in names} | _health_values(levels.health)
    values |= {name: round_from_one(values[name]) for name in ("reason", "plan_reason")}
    values |= {"rtt_us": levels.round_trip_us, "rtt_spread_us": levels.round_trip_spread_us}
    # States of other kinds hide whether the node is paused, too.
    if levels.state in _STATES_OF_PAUSE:
        values["pause_reason"] = levels.reason if levels.state == "paused" else ""
    return values


def _health_values(health: HealthView) -> JsonObject:
    """A node's health, its numbers to two digits: further ones are noise."""
    parts = ("speed", "reliability", "quality", "uptime")
    return {
        "health": health.level or None,
        "health_value": round(health.value, HEALTH_DIGITS),
        "health_reason": health.reason,
        "health_parts": {name: round(getattr(health, name), HEALTH_DIGITS) for name in parts},
    }


def _take_work(fold: JobFold, levels: NodeLevelsView, at_ms: int) -> None:
    """Fold a node's work in the open round. Rounds that no plan opens are opened by it."""
    each, memory = levels.participant, fold.memory
    if each is None or levels.round is None:
        return
    is_planned = fold.get("spec", "strategy") == "aware"
    if memory.open_round is None and levels.round == memory.next_round and not is_planned:
        fold.open_round(levels.round, at_ms, {})
    lane = None
    if memory.open_round == levels.round:
        lane = fold.require_lane(levels.round, each.node, at_ms)
    if lane is not None:
        _take_participant(fold, lane, each, at_ms)


def _take_participant(
    fold: JobFold, lane: tuple[str, ...], each: ParticipantView, at_ms: int
) -> None:
    is_live = each.state in _LIVE_STATES
    phase = (each.phase or live_phase(each.steps_done, each.steps_total)) if is_live else "wait"
    if not fold.draft.get(*lane, "inner_steps"):
        fold.draft.set((*lane, "inner_steps"), each.steps_total)
    level = {
        "state": each.state,
        "phase": phase,
        "steps_done": each.steps_done,
        "steps_total": each.steps_total,
        "loss": each.loss if each.steps_done else None,
        "reason": fold.draft.get(*lane, "reason"),
    }
    path = (*fold.path, "levels", each.node)
    if fold.draft.get(*path) is None:
        fold.draft.set(path, level)
    else:
        fold.draft.set_each(path, level)
    if not is_live or fold.draft.get(*lane, "result") != "pending":
        return
    segments = fold.draft.get(*lane, "segments")
    if not is_paused(segments):
        segments = continued_segments(segments, phase, at_ms)
        fold.draft.set((*lane, "segments"), segments)


def _node_values(node: NodeView, now_ms: int) -> JsonObject:
    names = (
        *("name", "state", "reason", "device", "device_name", "memory_bytes", "worker", "job"),
        *("software", "plan_reason", "pause_reason", "updates_accepted"),
    )
    values: JsonObject = {name: getattr(node, name) for name in names}
    values |= _health_values(node.health)
    reading = node.reading
    rtt, loss = reading.round_trip_us, reading.loss
    values |= {
        "caps": node.caps or None,
        "updates_rejected": node.updates_rejected,
        "seen_at_ms": now_ms - node.last_seen_ms_ago,
        "rtt_us": _whole(rtt.mean) if rtt else None,
        "rtt_spread_us": _whole(rtt.spread) if rtt else None,
        "loss": float(f"{loss.mean:.{READING_DIGITS}g}") if loss else None,
        "congestion_control": reading.congestion_control,
    }
    for name in _SPEEDS:
        estimate = getattr(reading, name)
        values[name] = _whole(estimate.mean) if estimate else None
    return values


def _whole(value: float) -> int:
    """A reading to three digits: further ones are noise, and would be sent all the time."""
    return int(float(f"{value:.{READING_DIGITS}g}"))
