"""Journalled events into changes of the feed's state. Unknown kinds change nothing but the list."""

from collections.abc import Callable
from typing import Any

import msgspec

from dashboard_api.core.changes import Draft, JsonObject
from dashboard_api.core.event_text import (
    HIDDEN_KINDS,
    closing_sentence,
    event_node,
    event_round,
    event_sentence,
)
from dashboard_api.core.lanes import (
    closed_segments,
    continued_segments,
    lanes_quorum,
    planned_lane,
    received_segments,
    resting_lane,
)
from dashboard_api.core.outputs import example_states, output_sample
from dashboard_api.core.state import (
    EVENTS_KEPT,
    LANES_KEPT,
    OUTPUTS_KEPT,
    REJECTIONS_KEPT,
    ROUNDS_KEPT,
    EventLine,
    JobState,
    NodeState,
    RoundState,
)
from hypergpu.client.values import JobEvent
from hypergpu.workloads.metrics import direction

PRICED_SCORE = 1_000_000
"""Score that the unit price pays for."""
_PLANNED = ("inner_steps", "codec", "batch")
"""What a plan says of a node."""
_NEWEST_WEIGHT = 0.25
"""Weight of the newest forecast error in a node's mean: about the last four rounds count."""
ROUNDS_KEPT_LEAST = 3


class JobMemory(msgspec.Struct):
    """Facts about a job that the fold needs and the feed does not show."""

    next_sequence: int = 0
    open_round: int | None = None
    is_planned: bool = False  # whether a plan told who takes part in the newest round
    next_round: int = 0
    slots: dict[str, int] = {}  # of nodes, in the order of joining
    paused_at_ms: int | None = None
    fits: dict[str, str] = {}  # why nodes have less in memory at once than the job states
    moved_at_ms: int = 0  # when the newest event was journalled, Unix time


class JobFold:
    """One job's part of the state, edited by its events."""

    def __init__(self, draft: Draft, job_id: str) -> None:
        self.draft = draft
        self.job_id = job_id
        self.path = ("jobs", job_id)
        self.memory = JobMemory()
        if draft.get(*self.path) is None:
            draft.set(self.path, msgspec.to_builtins(JobState(id=job_id)))

    def take_event(self, event: JobEvent, at_ms: int) -> None:
        """Fold one event; events that were folded before change nothing.

        Args:
            event: As journalled.
            at_ms: Its time on the wall clock; the journal's own time starts with the job.
        """
        if event.sequence < self.memory.next_sequence:
            return
        self.memory.next_sequence = event.sequence + 1
        self.memory.moved_at_ms = at_ms
        if fold := _FOLDS.get(event.kind):
            fold(self, event, at_ms)
        if event.kind not in HIDDEN_KINDS:
            line = msgspec.to_builtins(self.event_line(event, at_ms))
            self.draft.append((*self.path, "events"), [line], keep=EVENTS_KEPT)

    def event_line(self, event: JobEvent, at_ms: int) -> EventLine:
        """The event in a sentence."""
        text = event_sentence(event, node_names(self.draft))
        node, number = event_node(event), event_round(event)
        return EventLine(event.sequence, at_ms, event.kind, text, node, number)

    def get(self, *path: str) -> Any:
        """A value of the job."""
        return self.draft.get(*self.path, *path)

    def set(self, **values: Any) -> None:
        """Set values of the job."""
        self.draft.set_each(self.path, values)

    def round_path(self, number: int) -> tuple[str, ...]:
        """Where a round is."""
        return (*self.path, "rounds_by_number", str(number))

    def open_round(self, number: int, at_ms: int, lanes: JsonObject, **values: Any) -> None:
        """Add a round, and let go of the oldest ones."""
        state = RoundState(number, at_ms)
        self.draft.set(
            self.round_path(number), {**msgspec.to_builtins(state), "lanes": lanes, **values}
        )
        self.draft.set((*self.path, "levels"), {})
        self.memory.open_round, self.memory.next_round = number, number + 1
        self.memory.is_planned = "updates_needed" in values
        self._drop_old_rounds()

    def _drop_old_rounds(self) -> None:
        rounds = self.get("rounds_by_number") or {}
        lanes = sum(len(each["lanes"]) for each in rounds.values())
        for number in sorted(rounds, key=int):
            is_full = lanes > LANES_KEPT and len(rounds) > ROUNDS_KEPT_LEAST
            if len(rounds) <= ROUNDS_KEPT and not is_full:
                return
            lanes -= len(rounds[number]["lanes"])
            self.draft.drop((*self.path, "rounds_by_number", number))
            rounds = self.get("rounds_by_number")

    def require_lane(self, number: int, node: str, at_ms: int) -> tuple[str, ...] | None:
        """Where a node's lane is; an unplanned round and lane are added, a past one is not.

        None: the round is no longer, or was never, in the state.
        """
        round_path = self.round_path(number)
        if self.draft.get(*round_path) is None:
            if number < self.memory.next_round:
                return None
            self.open_round(number, at_ms, {})
        lane = (*round_path, "lanes", node)
        if self.draft.get(*lane) is None:
            start_ms = self.draft.get(*round_path, "started_at_ms")
            batch = (self.get("spec", "training") or {}).get("batch_size", 0)
            part = {"reason": self.memory.fits.get(node, "")}
            self.draft.set(lane, planned_lane(self.slot(node), part, batch, start_ms))
            if not self.memory.is_planned:
                needed = lanes_quorum(self.draft.get(*round_path, "lanes"), self.get("spec"))
                self.draft.set((*round_path, "updates_needed"), needed)
        return lane

    def slot(self, node: str) -> int:
        """The node's number in the job."""
        return self.memory.slots.setdefault(node, len(self.memory.slots))

    def end_lane(self, lane: tuple[str, ...], at_ms: int, result: str, reason: str) -> None:
        """Close a lane whose update is still awaited."""
        if self.draft.get(*lane, "result") == "pending":
            segments = closed_segments(self.draft.get(*lane, "segments"), at_ms)
            ended = {"segments": segments, "result": result, "result_reason": reason}
            self.draft.set_each(lane, ended)

    def end_round(self, number: int, at_ms: int) -> None:
        """Close a round and what is open in its lanes."""
        path = self.round_path(number)
        if self.draft.get(*path) is None or self.draft.get(*path, "ended_at_ms") is not None:
            return
        self.draft.set((*path, "ended_at_ms"), at_ms)
        for node in tuple(self.draft.get(*path, "lanes")):
            lane = (*path, "lanes", node)
            if self.get("spec", "strategy") != "aware":
                self.end_lane(lane, at_ms, "lost", "its update was not in when the round closed")
            elif self.draft.get(*lane, "result") == "pending":
                self.draft.set((*lane, "result_reason"), "its work goes on after the round")
            segments = closed_segments(self.draft.get(*lane, "segments"), at_ms)
            self.draft.set((*lane, "segments"), segments)
        if self.memory.open_round == number:
            self.memory.open_round = None
            self.draft.set((*self.path, "levels"), {})

    def measure_cost(self) -> None:
        """State what the accepted work is worth by the job's price."""
        worth = int(self.get("unit_price") or 0) * int(self.get("score") or 0) // PRICED_SCORE
        self.set(cost=str(worth))


def node_names(draft: Draft) -> dict[str, str]:
    """Owners' names of machines, by node."""
    return {node: each.get("name", "") for node, each in (draft.get("nodes") or {}).items()}


def _take_spec(fold: JobFold, spec: Any) -> None:
    if not isinstance(spec, dict):
        return
    pay, training = spec.get("pay") or {}, spec.get("training") or {}
    fold.set(
        spec=spec,
        name=str(spec.get("name") or ""),
        workload=str(spec.get("workload") or ""),
        rounds=int(training.get("rounds") or 0),
        unit_price=str(pay.get("unit_price") or 0),
        escrow=str(pay.get("escrow") or 0),
    )
    fold.measure_cost()


def _job_created(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    fold.set(created_at_ms=at_ms)
    _take_spec(fold, event.body.get("spec"))


def _parameters_changed(fold: JobFold, event: JobEvent, _at_ms: int) -> None:
    _take_spec(fold, event.body.get("spec"))


def _model_initialised(fold: JobFold, event: JobEvent, _at_ms: int) -> None:
    blob = _object(_object(event.body, "model"), "blob")
    fold.set(
        model_bytes=int(blob.get("size_bytes") or 0),
        model=blob.get("digest"),
        examples=example_states(_list(event.body, "examples")),
        target_mode=str(event.body.get("target_mode") or ""),
    )


def _node_joined(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    node = str(event.body.get("node"))
    fold.slot(node)
    path = ("nodes", node)
    if fold.draft.get(*path) is None:
        # Its readings come with the next answer; until then it collects what the journal tells.
        fold.draft.set(path, msgspec.to_builtins(NodeState(id=node)))
    if fold.draft.get(*path, "joined_at_ms") is None:
        fold.draft.set((*path, "joined_at_ms"), at_ms)
    # What it did for another job is not planned for this one.
    fold.draft.set_each(path, dict.fromkeys(_PLANNED))


def _node_lost(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    _end_open_lane(fold, event, at_ms, "lost")


def _node_paused(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    _end_open_lane(fold, event, at_ms, "handed_back")


def _end_open_lane(fold: JobFold, event: JobEvent, at_ms: int, result: str) -> None:
    node, number = str(event.body.get("node")), fold.memory.open_round
    if number is None:
        return
    lane = (*fold.round_path(number), "lanes", node)
    if fold.draft.get(*lane) is not None:
        fold.end_lane(lane, at_ms, result, str(event.body.get("reason") or ""))


def _round_planned(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    plan = _object(event.body, "plan")
    number = plan.get("round")
    if not isinstance(number, int):
        return
    batch = (fold.get("spec", "training") or {}).get("batch_size", 0)
    lanes: JsonObject = {}
    for node, part in _object(plan, "nodes").items():
        lanes[node] = planned_lane(fold.slot(node), part, batch, at_ms)
        if fold.draft.get("nodes", node) is not None:
            shown = {name: lanes[node][name] for name in _PLANNED}
            fold.draft.set_each(("nodes", node), shown)
    for node, reason in _object(plan, "resting").items():
        lanes[node] = resting_lane(fold.slot(node), str(reason), at_ms)
    deadline_ms = plan.get("deadline_ms") or 0
    fold.open_round(
        number,
        at_ms,
        lanes,
        updates_needed=plan.get("updates_needed") or lanes_quorum(lanes, fold.get("spec")),
        reason=str(plan.get("reason") or ""),
        deadline_at_ms=at_ms + deadline_ms if deadline_ms else None,
    )


def _update_received(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    update = _object(event.body, "update")
    lane = _lane_of(fold, event, at_ms)
    steps = int(update.get("inner_steps") or 0)
    exchanged = 2 * steps * int(fold.get("model_bytes") or 0)
    fold.set(naive_bytes=int(fold.get("naive_bytes") or 0) + exchanged)
    if lane is None:
        return
    before = fold.draft.get(*lane, "segments")
    segments, is_estimate = received_segments(before, update, at_ms)
    accepted = {
        "segments": segments,
        "is_estimate": is_estimate,
        "result": "accepted",
        "result_reason": "",
        "loss": update.get("loss_last"),
        "update_bytes": int(_object(update, "blob").get("size_bytes") or 0),
        "inner_steps": steps,
        "codec": update.get("codec") or fold.draft.get(*lane, "codec"),
    }
    _measure_forecast(fold, lane, str(event.body.get("node")), at_ms)
    # Most of the lane changes: the whole of it is shorter than so many changes.
    fold.draft.set(lane, {**fold.draft.get(*lane), **accepted})


def _measure_forecast(fold: JobFold, lane: tuple[str, ...], node: str, at_ms: int) -> None:
    """Let a node's mean forecast error move by what its newest round was off."""
    forecast_ms = fold.draft.get(*lane, "forecast_ms")
    took_ms = at_ms - fold.draft.get(*lane[:-2], "started_at_ms")
    if not forecast_ms or took_ms <= 0 or fold.draft.get("nodes", node) is None:
        return
    newest = abs(took_ms - forecast_ms) / took_ms
    before = fold.draft.get("nodes", node, "forecast_error")
    mean = newest if before is None else before + _NEWEST_WEIGHT * (newest - before)
    fold.draft.set(("nodes", node, "forecast_error"), round(mean, 3))


def _update_rejected(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    node, reason = str(event.body.get("node")), str(event.body.get("reason") or "")
    number = event_round(event) or 0
    if fold.draft.get("nodes", node) is not None:
        line = {"at_ms": at_ms, "job": fold.job_id, "round": number, "reason": reason}
        fold.draft.append(("nodes", node, "rejections"), [line], keep=REJECTIONS_KEPT)
    lane = (*fold.round_path(number), "lanes", node)
    if fold.draft.get(*lane) is not None:
        fold.end_lane(lane, at_ms, "rejected", reason)


def _shard_handed_back(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    if lane := _lane_of(fold, event, at_ms):
        fold.end_lane(lane, at_ms, "handed_back", str(event.body.get("reason") or ""))


def _memory_fitted(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    reason = str(event.body.get("reason") or "")
    fold.memory.fits[str(event.body.get("node"))] = reason
    if lane := _lane_of(fold, event, at_ms):
        segments = continued_segments(fold.draft.get(*lane, "segments"), "download", at_ms)
        again = {"reason": reason, "result": "pending", "result_reason": "", "segments": segments}
        fold.draft.set_each(lane, again)


def _aggregate_ready(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    number = event_round(event)
    blob = _object(_object(event.body, "model"), "blob")
    fold.set(model=blob.get("digest"))
    if number is None:
        return
    for omitted in _list(event.body, "omitted"):
        node, reason = str(omitted[0]), str(omitted[1])
        lane = (*fold.round_path(number), "lanes", node)
        if fold.draft.get(*lane) is not None:
            fold.draft.set_each(lane, {"result": "rejected", "result_reason": reason})
    fold.end_round(number, at_ms)


def _round_recorded(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    body, number = event.body, event_round(event)
    if number is None or (
        fold.draft.get(*fold.round_path(number)) is None and number < fold.memory.next_round
    ):
        return
    duration_ms = int(body.get("duration_ms") or 0)  # type: ignore[call-overload]
    if fold.draft.get(*fold.round_path(number)) is None:
        fold.open_round(number, at_ms - duration_ms, {})
    fold.end_round(number, at_ms)
    names = ("samples", "samples_per_s", "bytes_up", "bytes_down", "loss", "forecast_error")
    figures = {name: body.get(name) for name in (*names, "duration_ms")}
    figures["reason"] = closing_sentence(event)
    figures |= {"updates_needed": needed} if (needed := body.get("updates_needed")) else {}
    fold.draft.set_each(fold.round_path(number), figures)
    fold.set(samples_per_s=body.get("samples_per_s"), eta_ms=_eta_ms(fold, number))


def _eta_ms(fold: JobFold, number: int) -> int | None:
    """Time until the last planned round closes, at the pace of the newest ones."""
    rounds = fold.get("rounds_by_number") or {}
    ends = sorted(each["ended_at_ms"] for each in rounds.values() if each["ended_at_ms"])[-6:]
    left = int(fold.get("rounds") or 0) - number - 1
    if len(ends) < 2 or left < 0:
        return None
    return int((ends[-1] - ends[0]) * left // (len(ends) - 1))


def _round_measured(fold: JobFold, event: JobEvent, _at_ms: int) -> None:
    number, score = event_round(event), int(fold.get("score") or 0)
    for measured in _list(event.body, "updates"):
        contribution = _object(measured, "contribution")
        quality_bps = int(measured.get("quality_bps") or 0)
        score += quality_bps * int(contribution.get("samples") or 0)
        _add_work(fold, contribution)
        lane = (*fold.round_path(number or 0), "lanes", str(contribution.get("node")))
        if fold.draft.get(*lane) is not None:
            told = {"quality_bps": quality_bps, "result_reason": str(measured.get("reason") or "")}
            fold.draft.set_each(lane, told)
    fold.set(score=score)
    fold.measure_cost()


def _add_work(fold: JobFold, contribution: JsonObject) -> None:
    path = (*fold.path, "work", str(contribution.get("node")))
    before = fold.draft.get(*path) or {}
    add = {name: int(contribution.get(name) or 0) for name in ("samples", "compute_ms")}
    fold.draft.set(path, {name: before.get(name, 0) + count for name, count in add.items()})


def _evaluation_ready(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    body, number = event.body, event_round(event)
    loss, metric = body.get("loss"), body.get("metric")
    name, metrics = str(body.get("metric_name") or ""), _object(body, "metrics")
    mode = fold.get("target_mode") or direction(name)
    fold.set(loss=loss, metric=metric, metric_name=name, target_mode=mode)
    # The model of round n is what n closed rounds made; rounds count from 0.
    path = fold.round_path((number or 0) - 1)
    if not number:
        counts = {key: body.get(key) or 0 for key in ("samples", "samples_all")}
        fold.set(initial={"loss": loss, "metric": metric, "metrics": metrics, **counts})
    elif fold.draft.get(*path) is not None:
        for key, value in (("metric", metric), ("held_out_loss", loss), ("metrics", metrics)):
            fold.draft.set((*path, key), value)
    outputs = _list(body, "outputs")
    if sample := output_sample(fold.get("examples") or [], outputs, number or 0, at_ms):
        fold.draft.append((*fold.path, "samples_of_output"), [sample], keep=OUTPUTS_KEPT)


def _job_paused(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    fold.set(phase="paused", reason=str(event.body.get("reason") or "a user paused it"))
    fold.memory.paused_at_ms = at_ms
    for path, segments in _open_lanes(fold):
        fold.draft.set(path, continued_segments(segments, "pause", at_ms))


def _job_resumed(fold: JobFold, _event: JobEvent, at_ms: int) -> None:
    for path, segments in _open_lanes(fold):
        is_pending = fold.draft.get(*path[:-1], "result") == "pending"
        phase = "download" if is_pending else "wait"
        fold.draft.set(path, continued_segments(segments, phase, at_ms))
    paused_at_ms, fold.memory.paused_at_ms = fold.memory.paused_at_ms, None
    path = (*fold.round_path(fold.memory.open_round or 0), "deadline_at_ms")
    deadline_at_ms = fold.draft.get(*path)
    if fold.memory.open_round is not None and deadline_at_ms and paused_at_ms is not None:
        fold.draft.set(path, deadline_at_ms + at_ms - paused_at_ms)


def _open_lanes(fold: JobFold) -> list[tuple[tuple[str, ...], list[JsonObject]]]:
    """Paths and segments of the open round's lanes in which something goes on, besides rests."""
    if fold.memory.open_round is None:
        return []
    path = (*fold.round_path(fold.memory.open_round), "lanes")
    lanes = fold.draft.get(*path) or {}
    return [
        ((*path, node, "segments"), lane["segments"])
        for node, lane in lanes.items()
        if lane["segments"]
        and lane["segments"][-1]["end_ms"] is None
        and lane["segments"][-1]["phase"] != "rest"
    ]


def _job_ended(fold: JobFold, event: JobEvent, at_ms: int) -> None:
    if fold.memory.open_round is not None:
        fold.end_round(fold.memory.open_round, at_ms)
    phase, reason = str(event.body.get("phase")), str(event.body.get("reason") or "")
    fold.set(phase=phase, reason=reason, ended_at_ms=at_ms, eta_ms=None)


def _lane_of(fold: JobFold, event: JobEvent, at_ms: int) -> tuple[str, ...] | None:
    number = event_round(event)
    node = str(event.body.get("node"))
    return None if number is None else fold.require_lane(number, node, at_ms)


def _object(fields: Any, name: str) -> JsonObject:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, dict) else {}


def _list(fields: Any, name: str) -> list[Any]:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, list) else []


_FOLDS: dict[str, Callable[[JobFold, JobEvent, int], None]] = {
    "JobCreated": _job_created,
    "ParametersChanged": _parameters_changed,
    "ModelInitialised": _model_initialised,
    "NodeJoined": _node_joined,
    "NodeLost": _node_lost,
    "NodePaused": _node_paused,
    "RoundPlanned": _round_planned,
    "UpdateReceived": _update_received,
    "UpdateRejected": _update_rejected,
    "ShardHandedBack": _shard_handed_back,
    "MemoryFitted": _memory_fitted,
    "AggregateReady": _aggregate_ready,
    "RoundRecorded": _round_recorded,
    "RoundMeasured": _round_measured,
    "EvaluationReady": _evaluation_ready,
    "JobPaused": _job_paused,
    "JobResumed": _job_resumed,
    "JobEnded": _job_ended,
}
