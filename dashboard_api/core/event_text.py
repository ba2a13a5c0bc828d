"""Sentences for journalled events, and what of them a search finds."""

from collections.abc import Mapping

from hypergpu.client.history import weighing_note
from hypergpu.client.values import JobEvent
from hypergpu.terminal.output import metrics_text, round_from_one, score, short
from hypergpu.units import several

HIDDEN_KINDS = frozenset({"UpdateReceived"})
"""Kinds with an entry for each node of each round: history has them, the feed's list has not."""
_SENTENCES = {
    "JobCreated": "the job was created",
    "ModelInitialised": "the initial model is ready",
    "PreparationFailed": "the initial model could not be made: {reason}",
    "NodeJoined": "{node} joined",
    "NodeLost": "{node} was lost: {reason}",
    "NodeDraining": "{node} drains: {reason}",
    "NodePaused": "{node} rests: {reason}",
    "NodeReadmitted": "{node} was taken back after a ban",
    "RoundPlanned": "round {round} was planned: {reason}",
    "UpdateReceived": "the update of {node} for round {round} was accepted",
    "UpdateRejected": "the update of {node} for round {round} was rejected: {reason}",
    "ShardHandedBack": "{node} handed its shard of round {round} back: {reason}",
    "MemoryFitted": "{node} takes its shard of round {round} again: {reason}",
    "DeadlineReached": "a time limit of round {round} has passed",
    "AggregateReady": "the model of round {round} is ready",
    "ModelLost": "the model's bytes were damaged: {reason}",
    "EvaluationFailed": "the evaluation failed: {reason}",
    "JobPaused": "the job was paused{because}",
    "JobResumed": "the job goes on",
    "JobStopped": "the job was stopped",
    "ParametersChanged": "parameters were changed",
    "RoundMeasured": "the quality of round {round} is final",
    "JobEnded": "the job ended: {reason}",
    "CoordinatorChanged": "{reason}",
    "FundingChanged": "the funding of the job changed{because}",
}


def event_sentence(event: JobEvent, names: Mapping[str, str]) -> str:
    """An event for people; ``names`` are the owners' names of machines, by node."""
    fields = event.body
    if event.kind == "EvaluationReady":
        return _evaluation(event)
    if event.kind == "RoundRecorded":
        return closing_sentence(event)
    if event.kind == "AggregateReady" and (text := weighing_note(event, names)):
        return text
    node, reason = str(fields.get("node") or ""), str(fields.get("reason") or "")
    number, plan = event_round(event), fields.get("plan")
    if isinstance(plan, dict):
        reason = str(plan.get("reason") or "")
    return _SENTENCES.get(event.kind, event.kind).format(
        node=names.get(node) or short(node),
        reason=reason or "no reason was given",
        because=f": {reason}" if reason else "",
        round=1 if number is None else number + 1,
    )


def closing_sentence(event: JobEvent) -> str:
    """Why a round closed. Rounds of sentences count from 1, those of the journal from 0."""
    reason = str(event.body.get("reason") or "the round closed")
    return round_from_one(reason)


def event_round(event: JobEvent) -> int | None:
    """Round that an event belongs to, counted from 0; None: to no round."""
    plan = event.body.get("plan")
    number = (plan if isinstance(plan, dict) else event.body).get("round")
    return number if isinstance(number, int) else None


def event_node(event: JobEvent) -> str | None:
    """Node that an event is about; None: no node."""
    node = event.body.get("node")
    return node if isinstance(node, str) else None


def _evaluation(event: JobEvent) -> str:
    fields = event.body
    metric, loss = (_as_number(fields.get(name)) for name in ("metric", "loss"))
    others = fields.get("metrics")
    name, more = str(fields.get("metric_name") or ""), others if isinstance(others, dict) else {}
    number = fields.get("round")
    rounds = several(number, "round") if isinstance(number, int) else "some rounds"
    count = fields.get("samples")
    measured = f" on {several(count, 'sample')}" if isinstance(count, int) and count else ""
    return f"after {rounds}: {metrics_text(name, metric, more)}, loss {score(loss)}{measured}"


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
