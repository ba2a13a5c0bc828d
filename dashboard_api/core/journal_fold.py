"""Journalled events into changes of the feed's state. Unknown kinds change nothing but the list."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dashboard_api.core.changes import Draft, JsonObject
from dashboard_api.core.farm_fold import FarmFold, FarmMemory
from dashboard_api.core.lanes import (
    closed_segments,
    continued_segments,
    lanes_quorum,
    planned_lane,
    received_segments,
    resting_lane,
)
from dashboard_api.core.outputs import example_states, output_sample
from dashboard_api.core.serving_fold import take_serving_event
from dashboard_api.core.state import (
    EVENTS_KEPT,
    LANES_KEPT,
    OUTPUTS_KEPT,
    REJECTIONS_KEPT,
    ROUNDS_KEPT,
    EvaluationState,
    EventLine,
    JobState,
    NodeState,
    RoundState,
)
from hypergpu.journal.events import (
    AggregateReadyEvent,
    EvaluationReadyEvent,
    JobCreatedEvent,
    JobEndedEvent,
    JobPausedEvent,
    JobResumedEvent,
    MemoryFittedEvent,
    ModelInitialisedEvent,
    NodeJoinedEvent,
    NodeLostEvent,
    NodePart,
    NodePausedEvent,
    ParametersChangedEvent,
    RoundMeasuredEvent,
    RoundPlannedEvent,
    RoundRecordedEvent,
    ShardHandedBackEvent,
    UpdateReceivedEvent,
    UpdateRejectedEvent,
)
from hypergpu.journal.public_event import PublicEvent
from hypergpu.journal.sentences import event_node, event_round, event_sentence
from hypergpu.journal.text import round_from_one
from hypergpu.journal.worth import cost
from hypergpu.statements import Contribution
from hypergpu.user.client.values import JobEvent
from hypergpu.workloads.metrics import direction

_PLANNED = ("inner_steps", "codec", "batch")
"""What a plan says of a node."""
_ROUND_FIGURES = (
    *("samples", "samples_per_s", "bytes_up", "bytes_down", "loss", "forecast_error"),
    "duration_ms",
)
"""Figures of a closed round that the feed has."""
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
    scores: dict[str, int] = {}  # of the nodes' accepted and measured work
    fits: dict[str, str] = {}  # why nodes have less in memory at once than the job states
    moved_at_ms: int = 0  # when the newest event was journalled, Unix time


class JobFold:
    """One job's part of the state, edited by its events."""

    def __init__(self, draft: Draft, job_id: str) -> None:
        self.draft = draft
        self.job_id = job_id
        self.path = ("jobs", job_id)
        self.memory = JobMemory()
        self.farm = FarmFold(draft, self.path, FarmMemory())
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
        if event.content and (fold := _FOLDS.get(type(event.content))):
            fold(self, event.content, at_ms)
        elif event.content:
            self.farm.take_event(event.content, at_ms)
            take_serving_event(self.draft, self.path, event.content, at_ms)
        # An entry for each node of each round: history has them, the feed's list has not.
        if not isinstance(event.content, UpdateReceivedEvent):
            line = msgspec.to_builtins(self.event_line(event, at_ms))
            self.draft.append((*self.path, "events"), [line], keep=EVENTS_KEPT)

    def event_line(self, event: JobEvent, at_ms: int) -> EventLine:
        """The event in a sentence."""
        if (content := event.content) is None:
            return EventLine(event.sequence, at_ms, event.kind, event.kind)
        text = event_sentence(content, node_names(self.draft))
        node, number = event_node(content), event_round(content)
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
            part = NodePart(reason=self.memory.fits.get(node, ""))
            self.draft.set(lane, planned_lane(self.slot(node), part, batch, start_ms))
            if not self.memory.is_planned:
                quorum_updates = lanes_quorum(
                    self.draft.get(*round_path, "lanes"), self.get("spec")
                )
                self.draft.set((*round_path, "updates_needed"), quorum_updates)
        return lane

    def slot(self, node: str) -> int:
        """The node's number in the job."""
        return self.memory.slots.setdefault(node, len(self.memory.slots))

    def end_lane(self, lane: tuple[str, ...], at_ms: int, result: str, reason: str) -> None:
        """Close a lane whose update is still awaited."""
        if self.draft.get(*lane, "result") == "pending":
            segments = closed_segments(self.draft.get(*lane, "segments"), at_ms)
            why = round_from_one(reason)
            lane_end = {"segments": segments, "result": result, "result_reason": why}
            self.draft.set_each(lane, lane_end)

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
        price = int(self.get("unit_price") or 0)
        self.set(cost=str(cost(price, self.memory.scores.values())))


def node_names(draft: Draft) -> dict[str, str]:
    """Owners' names of machines, by node."""
    return {node: each.get("name", "") for node, each in (draft.get("nodes") or {}).items()}


def _take_spec(fold: JobFold, spec: JsonObject) -> None:
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


def _job_created(fold: JobFold, event: JobCreatedEvent, at_ms: int) -> None:
    fold.set(created_at_ms=at_ms)
    _take_spec(fold, event.spec)


def _model_initialised(fold: JobFold, event: ModelInitialisedEvent, _at_ms: int) -> None:
    fold.set(
        model_bytes=event.model.blob.size_bytes,
        model=event.model.blob.digest,
        examples=example_states(event.examples),
        target_mode=event.target_mode,
    )


def _node_joined(fold: JobFold, event: NodeJoinedEvent, at_ms: int) -> None:
    fold.slot(event.node)
    path = ("nodes", event.node)
    if fold.draft.get(*path) is None:
        # Its readings come with the next answer; until then it collects what the journal tells.
        fold.draft.set(path, msgspec.to_builtins(NodeState(id=event.node)))
    if fold.draft.get(*path, "joined_at_ms") is None:
        fold.draft.set((*path, "joined_at_ms"), at_ms)
    # What it did for another job is not planned for this one.
    fold.draft.set_each(path, dict.fromkeys(_PLANNED))


def _node_lost(fold: JobFold, event: NodeLostEvent, at_ms: int) -> None:
    _end_open_lane(fold, event, at_ms, "lost")


def _node_paused(fold: JobFold, event: NodePausedEvent, at_ms: int) -> None:
    _end_open_lane(fold, event, at_ms, "handed_back")


def _end_open_lane(
    fold: JobFold, event: NodeLostEvent | NodePausedEvent, at_ms: int, result: str
) -> None:
    number = fold.memory.open_round
    if number is None:
        return
    lane = (*fold.round_path(number), "lanes", event.node)
    if fold.draft.get(*lane) is not None:
        fold.end_lane(lane, at_ms, result, event.reason)


def _round_planned(fold: JobFold, event: RoundPlannedEvent, at_ms: int) -> None:
    plan = event.plan
    batch = (fold.get("spec", "training") or {}).get("batch_size", 0)
    lanes: JsonObject = {}
    for node, part in plan.nodes.items():
        lanes[node] = planned_lane(fold.slot(node), part, batch, at_ms)
        if fold.draft.get("nodes", node) is not None:
            lane_plan = {name: lanes[node][name] for name in _PLANNED}
            fold.draft.set_each(("nodes", node), lane_plan)
    for node, reason in plan.resting.items():
        lanes[node] = resting_lane(fold.slot(node), reason, at_ms)
    fold.open_round(
        plan.round,
        at_ms,
        lanes,
        updates_needed=plan.updates_needed or lanes_quorum(lanes, fold.get("spec")),
        reason=round_from_one(plan.reason),
        deadline_at_ms=at_ms + plan.deadline_ms if plan.deadline_ms else None,
    )


def _update_received(fold: JobFold, event: UpdateReceivedEvent, at_ms: int) -> None:
    update = event.update
    lane = fold.require_lane(event.round, event.node, at_ms)
    exchanged_bytes = 2 * update.inner_steps * int(fold.get("model_bytes") or 0)
    fold.set(naive_bytes=int(fold.get("naive_bytes") or 0) + exchanged_bytes)
    if lane is None:
        return
    before = fold.draft.get(*lane, "segments")
    segments, is_estimate = received_segments(before, update, at_ms)
    accepted_lane = {
        "segments": segments,
        "is_estimate": is_estimate,
        "result": "accepted",
        "result_reason": "",
        "loss": update.loss_last,
        "update_bytes": update.blob.size_bytes if update.blob else 0,
        "inner_steps": update.inner_steps,
        "codec": update.codec or fold.draft.get(*lane, "codec"),
    }
    _measure_forecast(fold, lane, event.node, at_ms)
    # Most of the lane changes: the whole of it is shorter than so many changes.
    fold.draft.set(lane, {**fold.draft.get(*lane), **accepted_lane})


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


def _update_rejected(fold: JobFold, event: UpdateRejectedEvent, at_ms: int) -> None:
    node, number = event.node, event.round
    if fold.draft.get("nodes", node) is not None:
        reason = round_from_one(event.reason)
        line = {"at_ms": at_ms, "job": fold.job_id, "round": number, "reason": reason}
        fold.draft.append(("nodes", node, "rejections"), [line], keep=REJECTIONS_KEPT)
    lane = (*fold.round_path(number), "lanes", node)
    if fold.draft.get(*lane) is not None:
        fold.end_lane(lane, at_ms, "rejected", event.reason)


def _shard_handed_back(fold: JobFold, event: ShardHandedBackEvent, at_ms: int) -> None:
    if lane := fold.require_lane(event.round, event.node, at_ms):
        fold.end_lane(lane, at_ms, "handed_back", event.reason)


def _memory_fitted(fold: JobFold, event: MemoryFittedEvent, at_ms: int) -> None:
    fold.memory.fits[event.node] = event.reason
    if lane := fold.require_lane(event.round, event.node, at_ms):
        segments = continued_segments(fold.draft.get(*lane, "segments"), "download", at_ms)
        reason = round_from_one(event.reason)
        again = {"reason": reason, "result": "pending", "result_reason": ""}
        fold.draft.set_each(lane, {**again, "segments": segments})


def _aggregate_ready(fold: JobFold, event: AggregateReadyEvent, at_ms: int) -> None:
    fold.set(model=event.model.blob.digest if event.model else None)
    for node, reason in event.omitted:
        lane = (*fold.round_path(event.round), "lanes", node)
        if fold.draft.get(*lane) is not None:
            rejection = {"result": "rejected", "result_reason": round_from_one(reason)}
            fold.draft.set_each(lane, rejection)
    fold.end_round(event.round, at_ms)


def _round_recorded(fold: JobFold, event: RoundRecordedEvent, at_ms: int) -> None:
    path = fold.round_path(event.round)
    if fold.draft.get(*path) is None:
        if event.round < fold.memory.next_round:
            return
        fold.open_round(event.round, at_ms - event.duration_ms, {})
    fold.end_round(event.round, at_ms)
    figures = {name: getattr(event, name) for name in _ROUND_FIGURES}
    figures["reason"] = round_from_one(event.reason)
    if event.updates_needed:
        figures["updates_needed"] = event.updates_needed
    fold.draft.set_each(path, figures)
    fold.set(samples_per_s=event.samples_per_s, eta_ms=_eta_ms(fold, event.round))


def _eta_ms(fold: JobFold, number: int) -> int | None:
    """Time until the last planned round closes, at the pace of the newest ones."""
    rounds = fold.get("rounds_by_number") or {}
    ends = sorted(each["ended_at_ms"] for each in rounds.values() if each["ended_at_ms"])[-6:]
    rounds_ahead = int(fold.get("rounds") or 0) - number - 1
    if len(ends) < 2 or rounds_ahead < 0:
        return None
    return int((ends[-1] - ends[0]) * rounds_ahead // (len(ends) - 1))


def _round_measured(fold: JobFold, event: RoundMeasuredEvent, _at_ms: int) -> None:
    for work in event.updates:
        fold.memory.scores[work.node] = fold.memory.scores.get(work.node, 0) + work.score
        _add_work(fold, work.contribution)
        lane = (*fold.round_path(event.round), "lanes", work.node)
        if fold.draft.get(*lane) is not None:
            reason = round_from_one(work.reason)
            quality = {"quality_bps": work.quality_bps, "result_reason": reason}
            fold.draft.set_each(lane, quality)
    fold.set(score=sum(fold.memory.scores.values()))
    fold.measure_cost()


def _add_work(fold: JobFold, contribution: Contribution) -> None:
    path = (*fold.path, "work", contribution.node)
    before = fold.draft.get(*path) or {}
    counts = {"samples": contribution.samples, "compute_ms": contribution.compute_ms}
    fold.draft.set(path, {name: before.get(name, 0) + count for name, count in counts.items()})


def _evaluation_ready(fold: JobFold, event: EvaluationReadyEvent, at_ms: int) -> None:
    loss, metric, metrics = event.loss, event.metric, event.further_metrics
    mode = fold.get("target_mode") or direction(event.metric_name)
    fold.set(loss=loss, metric=metric, metric_name=event.metric_name, target_mode=mode)
    # The model of round n is what n closed rounds made; rounds count from 0.
    path = fold.round_path(event.round - 1)
    if not event.round:
        first = EvaluationState(loss, metric, metrics, event.samples, event.samples_all)
        fold.set(initial=msgspec.structs.asdict(first))
    elif fold.draft.get(*path) is not None:
        for key, value in (("metric", metric), ("held_out_loss", loss), ("metrics", metrics)):
            fold.draft.set((*path, key), value)
    examples = fold.get("examples") or []
    if sample := output_sample(examples, event.outputs, event.round, at_ms):
        fold.draft.append((*fold.path, "samples_of_output"), [sample], keep=OUTPUTS_KEPT)


def _job_paused(fold: JobFold, event: JobPausedEvent, at_ms: int) -> None:
    fold.set(phase="paused", reason=round_from_one(event.reason) or "a user paused it")
    fold.memory.paused_at_ms = at_ms
    for path, segments in _open_lanes(fold):
        fold.draft.set(path, continued_segments(segments, "pause", at_ms))


def _job_resumed(fold: JobFold, _event: JobResumedEvent, at_ms: int) -> None:
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


def _job_ended(fold: JobFold, event: JobEndedEvent, at_ms: int) -> None:
    if fold.memory.open_round is not None:
        fold.end_round(fold.memory.open_round, at_ms)
    reason = round_from_one(event.reason)
    fold.set(phase=event.phase, reason=reason, ended_at_ms=at_ms, eta_ms=None)


_FOLDS: Mapping[type[PublicEvent], Callable[[JobFold, Any, int], None]] = {
    JobCreatedEvent: _job_created,
    ParametersChangedEvent: lambda fold, event, _at_ms: _take_spec(fold, event.spec),
    ModelInitialisedEvent: _model_initialised,
    NodeJoinedEvent: _node_joined,
    NodeLostEvent: _node_lost,
    NodePausedEvent: _node_paused,
    RoundPlannedEvent: _round_planned,
    UpdateReceivedEvent: _update_received,
    UpdateRejectedEvent: _update_rejected,
    ShardHandedBackEvent: _shard_handed_back,
    MemoryFittedEvent: _memory_fitted,
    AggregateReadyEvent: _aggregate_ready,
    RoundRecordedEvent: _round_recorded,
    RoundMeasuredEvent: _round_measured,
    EvaluationReadyEvent: _evaluation_ready,
    JobPausedEvent: _job_paused,
    JobResumedEvent: _job_resumed,
    JobEndedEvent: _job_ended,
}
