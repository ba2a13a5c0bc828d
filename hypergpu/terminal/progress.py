"""A job as its public events tell it: a pure fold. It knows the events' names, not the machine."""

from collections.abc import Mapping

import msgspec

from hypergpu.client.values import EventLine, JobView, ParticipantView
from hypergpu.terminal.figures import short
from hypergpu.terminal.plans import PlanView, plan_news, plan_view

ROUNDS_KEPT = 1000
ENDED = frozenset({"finished", "stopped", "failed"})
"""Phases that a job does not leave."""


class RoundLine(msgspec.Struct, frozen=True):
    """A closed round. ``number`` counts from 1, as people do."""

    number: int
    participants: int
    updates: int
    bytes_up: int
    bytes_down: int
    duration_ms: int
    loss: float | None
    samples_per_s: float
    reason: str
    metric: float | None = None


class Progress(msgspec.Struct, frozen=True):
    """What a watcher knows."""

    job: JobView | None = None
    participants: tuple[ParticipantView, ...] = ()
    rounds: tuple[RoundLine, ...] = ()
    notes: tuple[str, ...] = ()
    """What happened to nodes and the job, in people's words; newest last."""
    next_sequence: int = 0
    plan: PlanView | None = None
    """The newest round's, where rounds are planned."""
    plan_news: tuple[str, ...] = ()
    """What it changed, a line a node."""
    names: dict[str, str] = {}
    """What owners call the machines, by node."""


def with_job(
    progress: Progress, job: JobView, participants: tuple[ParticipantView, ...]
) -> Progress:
    """The newest summary, asked for beside the stream."""
    return with_participants(msgspec.structs.replace(progress, job=job), participants)


def with_note(progress: Progress, text: str) -> Progress:
    """Something that the journal does not tell."""
    return msgspec.structs.replace(progress, notes=(*progress.notes, text)[-ROUNDS_KEPT:])


def with_participants(progress: Progress, participants: tuple[ParticipantView, ...]) -> Progress:
    """Conflated progress of the open round; between rounds the last one's stays."""
    if not participants:
        return progress
    named = {each.node: each.name for each in participants if each.name}
    names = {**progress.names, **named}
    return msgspec.structs.replace(progress, participants=participants, names=names)


def with_event(progress: Progress, event: EventLine) -> Progress:
    """One journalled event."""
    rounds = progress.rounds
    if event.kind == "RoundRecorded":
        rounds = (*rounds, _round_line(event.body))[-ROUNDS_KEPT:]
    elif event.kind == "EvaluationReady":
        rounds = _with_metric(rounds, event.body)
    elif event.kind == "RoundPlanned":
        progress = _with_plan(progress, plan_view(event.body))
    text = note_of(event)
    told = with_note(progress, text) if text else progress
    return msgspec.structs.replace(told, rounds=rounds, next_sequence=event.sequence + 1)


def _with_plan(progress: Progress, plan: PlanView) -> Progress:
    news = tuple(plan_news(plan, progress.plan, progress.names))
    return msgspec.structs.replace(progress, plan=plan, plan_news=news)


def _number(fields: Mapping[str, object], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else None


def _count(fields: Mapping[str, object], name: str) -> int:
    return int(_number(fields, name) or 0)


def _round_line(fields: Mapping[str, object]) -> RoundLine:
    return RoundLine(
        number=_count(fields, "round") + 1,
        participants=_count(fields, "participants"),
        updates=_count(fields, "updates"),
        bytes_up=_count(fields, "bytes_up"),
        bytes_down=_count(fields, "bytes_down"),
        duration_ms=_count(fields, "duration_ms"),
        loss=_number(fields, "loss"),
        samples_per_s=_number(fields, "samples_per_s") or 0.0,
        reason=str(fields.get("reason", "")),
    )


def _with_metric(
    rounds: tuple[RoundLine, ...], fields: Mapping[str, object]
) -> tuple[RoundLine, ...]:
    # The model of round n is what n closed rounds made.
    number, metric = _count(fields, "round"), _number(fields, "metric")
    return tuple(
        msgspec.structs.replace(line, metric=metric) if line.number == number else line
        for line in rounds
    )


def note_of(event: EventLine) -> str:
    """An event in a sentence, when it is worth one to a watcher."""
    fields = event.body
    node = short(str(fields.get("node", "")))
    reason = str(fields.get("reason", ""))
    closing = {
        "NodeJoined": f"node {node} joined",
        "NodeLost": f"node {node} lost: {reason}",
        "NodeDraining": f"node {node} drains: {reason}",
        "UpdateRefused": f"update of {node} refused: {reason}",
        "ShardHandedBack": f"node {node} handed its shard back: {reason}",
        "DeadlineReached": f"round {_count(fields, 'round') + 1} reached its deadline",
        "ModelInitialised": "the initial model is ready",
        "PreparationFailed": "the initial model could not be made",
        "ModelLost": f"the model's bytes were damaged: {reason}",
        "EvaluationFailed": f"evaluation failed: {reason}",
        "JobPaused": "paused",
        "JobResumed": "resumed",
        "JobStopped": "stopped",
        "ParametersChanged": "parameters changed",
    }
    return closing.get(event.kind, "")
