"""The feed's state: a pure fold of journalled events and of levels that the coordinator tells.

Events are facts with a sequence number. Levels (summaries, progress, readings, accounts) are
conflated: only the newest counts. Equal inputs in the same order give equal changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dashboard_api.core.changes import Change, Draft, JsonObject
from dashboard_api.core.journal_fold import JobFold, JobMemory, node_names
from dashboard_api.core.lanes import continued_segments, live_phase, planned_lane
from dashboard_api.core.state import EventLine, NodeState, PaymentsState, empty_state
from hypergpu.client.values import JobEvent, JobView, NodeView, ParticipantView

SEEN_STEP_MS = 15_000
"""A node's time of last contact moves in steps of this: it would else change all the time."""
READING_DIGITS = 3
_LIVE_STATES = frozenset({"pending"})


class FeedProjection:
    """State of the feed with its changes since they were last taken."""

    def __init__(self, address: str, tree: JsonObject | None = None) -> None:
        self._draft = Draft(tree if tree is not None else empty_state(address))
        self._jobs: dict[str, JobFold] = {}

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
        fold.take_event(event, at_ms)
        return fold.event_line(event, at_ms)

    def take_reachability(self, reason: str, at_ms: int, *, is_reachable: bool) -> None:
        """State whether the coordinator answers."""
        told = {"is_reachable": is_reachable, "reason": reason}
        before = self._draft.get("coordinator") or {}
        if any(before.get(name) != value for name, value in told.items()):
            self._draft.set_each(("coordinator",), {**told, "at_ms": at_ms})

    def take_jobs(self, jobs: Sequence[JobView]) -> None:
        """Fold the summaries of all jobs; a job that is not among them is gone."""
        present = {job.id for job in jobs}
        for job_id in set(self._draft.get("jobs") or {}) - present:
            self._draft.drop(("jobs", job_id))
            self._jobs.pop(job_id, None)
        for job in jobs:
            self._job(job.id).set(**_summary(job))

    def take_progress(
        self, job_id: str, participants: Sequence[ParticipantView], at_ms: int
    ) -> None:
        """Fold the progress of a job's open round."""
        fold = self._job(job_id)
        if not participants:
            return
        if fold.memory.open_round is None and any(_is_live(each) for each in participants):
            batch = (fold.get("spec", "training") or {}).get("batch_size", 0)
            lanes = {
                each.node: planned_lane(each.slot, {"inner_steps": each.steps_total}, batch, at_ms)
                for each in participants
            }
            fold.open_round(fold.memory.next_round, at_ms, lanes)
        for each in participants:
            _take_participant(fold, each, at_ms)

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
    values["updates_rejected"] = job.updates_refused
    # Losses of evaluations come with their events; the summary knows them after a restart, too.
    values |= {name: v for name in ("loss", "metric") if (v := getattr(job, name)) is not None}
    return values


def _is_live(participant: ParticipantView) -> bool:
    return participant.state in _LIVE_STATES


def _take_participant(fold: JobFold, each: ParticipantView, at_ms: int) -> None:
    is_live = _is_live(each)
    phase = live_phase(each.steps_done, each.steps_total) if is_live else "wait"
    level = {
        "state": each.state,
        "phase": phase,
        "steps_done": each.steps_done,
        "steps_total": each.steps_total,
        "loss": each.loss if each.steps_done else None,
        "reason": each.reason,
    }
    path = (*fold.path, "levels", each.node)
    if fold.draft.get(*path) is None:
        fold.draft.set(path, level)
    else:
        fold.draft.set_each(path, level)
    number = fold.memory.open_round
    lane = (*fold.round_path(number or 0), "lanes", each.node)
    if number is None or not is_live or fold.draft.get(*lane, "result") != "pending":
        return
    segments = continued_segments(fold.draft.get(*lane, "segments"), phase, at_ms)
    fold.draft.set((*lane, "segments"), segments)


def _node_values(node: NodeView, now_ms: int) -> JsonObject:
    names = (
        *("name", "state", "reason", "device", "device_name", "memory_bytes", "worker", "job"),
        *("software", "health", "health_reason", "updates_accepted"),
    )
    values: JsonObject = {name: getattr(node, name) for name in names}
    reading = node.reading
    rtt, loss = reading.round_trip_us, reading.loss
    values |= {
        "updates_rejected": node.updates_refused,
        "seen_at_ms": now_ms - node.last_seen_ms_ago,
        "rtt_us": _whole(rtt.mean) if rtt else None,
        "rtt_spread_us": _whole(rtt.spread) if rtt else None,
        "loss": float(f"{loss.mean:.{READING_DIGITS}g}") if loss else None,
        "congestion_control": reading.congestion_control,
    }
    for name in ("up_bits_per_s", "down_bits_per_s", "step_us"):
        estimate = getattr(reading, name)
        values[name] = _whole(estimate.mean) if estimate else None
    return values


def _whole(value: float) -> int:
    """A reading to three digits: further ones are noise, and would be sent all the time."""
    return int(float(f"{value:.{READING_DIGITS}g}"))
