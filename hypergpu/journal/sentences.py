"""Sentences for public events: one table for terminal, page and history. Rounds count from 1."""

from collections.abc import Iterator, Mapping

from hypergpu.journal.events import (
    AggregateReadyEvent,
    EvaluationReadyEvent,
    JournalledPlan,
    event_kind,
)
from hypergpu.journal.public_event import PublicEvent
from hypergpu.journal.serving_events import RingRoundStoredEvent
from hypergpu.journal.text import metrics_text, round_from_one, score, short
from hypergpu.token_counts import TokenCount
from hypergpu.units import several
from hypergpu.work_units import WorkUnit

SENTENCES: Mapping[str, str] = {
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
    "AggregateReady": "{weighing}",
    "ModelLost": "the model's bytes were damaged: {reason}",
    "RoundRecorded": "{reason}",
    "RoundMeasured": "the quality of round {round} is final",
    "EvaluationReady": "{evaluation}",
    "EvaluationFailed": "the evaluation failed: {reason}",
    "JobPaused": "the job was paused{because}",
    "JobResumed": "the job goes on",
    "JobStopped": "the job was stopped",
    "ParametersChanged": "parameters were changed",
    "CoordinatorChanged": "{reason}",
    "FundingChanged": "the funding of the job changed{because}",
    "MapCreated": "a farm job of {items} was created",
    "BundleReturned": "{node} sent a result for bundle {bundle}",
    "BundleHandedBack": "{node} handed bundle {bundle} back: {reason}",
    "BundleAccepted": "the result of {node} for {items} from {start} on counts",
    "PartConfirmed": "nodes agree on a part of bundle {bundle}, which is done again",
    "BundlesDue": "the time of a bundle is over",
    "ResultsCompared": "results of bundle {bundle} were compared",
    "ItemDropped": "item {item} was given up: {reason}",
    "ResultDoubted": "the result of {node} for bundle {bundle} does not count: {reason}",
    "BudgetRaised": "the job's budget was raised",
    "ServeCreated": "a job that serves {model} was created",
    "VersionPublished": "nodes take up the model after {rounds}",
    "ModelUnloaded": "nodes let go of the model: {reason}",
    "ModelWanted": "a call came, and nodes load the model again",
    "ReplicaHandedBack": "{node} does not hold the model: {reason}",
    "RingPlaced": "layers were placed: {reason}",
    "RingUnplaced": "layers are on no node: {reason}",
    "StandbyPlaced": "{node} stands by: {reason}",
    "StageMoved": "{to} takes the layers of {node}: {reason}",
    "RingRoundStored": "{rounds} of the training through the ring are stored: {losses}",
    "WindowCounted": "{count} of {node} were counted",
    "WindowSigned": "{node} signed its count {window}",
    "WindowAccepted": "{units} of {node} count",
    "WindowRefused": "{units} of {node} are not paid: {reason}",
    "AnswerChecked": "an answer of {node} was scored again",
    "CheckUndecided": "nobody is there to decide about an answer of {node}",
    "AnswerDoubted": "an answer of {node} is not paid: {reason}",
    "StageChecked": "a stage of {node} was computed again",
    "StagesContradicted": "another node contradicts {node}: {reason}",
    "CountsClosed": "all counts of the stopped model are in",
    "SettlementDue": "the time to sign counts is over",
    "JobEnded": "the job ended: {reason}",
}
"""A sentence for each kind."""
FIGURE_KINDS = frozenset({
    "JobCreated", "RoundPlanned", "UpdateReceived", "RoundRecorded", "RoundMeasured",
    "EvaluationReady", "FundingChanged", "JobEnded", "MapCreated", "BundleReturned",
    "BundleAccepted", "ResultsCompared", "ServeCreated", "WindowCounted", "WindowSigned",
    "WindowAccepted", "AnswerChecked", "StageChecked",
})  # fmt: skip
"""Kinds that a live view of the job shows by its figures, so that it needs no sentence for them."""
_NAMED_MOST = 3


def event_sentence(event: PublicEvent, names: Mapping[str, str]) -> str:
    """An event for people; ``names`` are the owners' names of machines, by node."""
    node, reason = event_node(event) or "", round_from_one(getattr(event, "reason", ""))
    return SENTENCES[event_kind(event)].format(
        node=names.get(node) or short(node),
        reason=reason or "no reason was given",
        because=f": {reason}" if reason else "",
        round=(event_round(event) or 0) + 1,
        items=several(getattr(event, "items", 0), "item"),
        start=getattr(event, "start", 0) + 1,
        item=getattr(event, "item", 0) + 1,
        bundle=getattr(event, "bundle", 0) + 1,
        model=getattr(event, "model", ""),
        window=getattr(event, "window", 0),
        rounds=several(getattr(event, "rounds", 0), "round"),
        units=_units_text(getattr(event, "units", 0), getattr(event, "unit", "tokens")),
        count=_count_text(event),
        loss=score(getattr(event, "loss", None)),
        losses=_losses_text(event),
        weighing=_aggregate_text(event, names) if isinstance(event, AggregateReadyEvent) else "",
        evaluation=evaluation_text(event) if isinstance(event, EvaluationReadyEvent) else "",
    )


def _count_text(event: PublicEvent) -> str:
    count = getattr(event, "count", None)
    if not isinstance(count, TokenCount):
        return ""
    unit = WorkUnit.LAYER_TOKENS if count.layers else WorkUnit.TOKENS
    return _units_text(count.units, unit.value)


def _units_text(units: int, unit: str) -> str:
    return several(units, unit.removesuffix("s"))


def _losses_text(event: PublicEvent) -> str:
    held_out_loss = getattr(event, "held_out_loss", None)
    held_out = "" if held_out_loss is None else f", held out {score(held_out_loss)}"
    text = f"loss {score(getattr(event, 'loss', None))}{held_out}"
    if not isinstance(event, RingRoundStoredEvent) or not event.shares:
        return text
    losses = ", ".join(score(each.loss) for each in event.shares)
    left_out = f"; {event.left_out}" if event.left_out else ""
    return f"{text}, of {several(len(event.shares), 'ring')} ({losses}){left_out}"


def live_note(event: PublicEvent, names: Mapping[str, str]) -> str:
    """The sentence of an event that a live view's figures do not show; empty: they do."""
    if isinstance(event, AggregateReadyEvent):
        return weighing_note(event, names)
    return "" if event_kind(event) in FIGURE_KINDS else event_sentence(event, names)


def event_round(event: PublicEvent) -> int | None:
    """Round that an event belongs to, counted from 0; None: to no round."""
    number = getattr(event, "round", None)
    return number if isinstance(number, int) else None


def event_node(event: PublicEvent) -> str | None:
    """Node that an event is about; None: no node."""
    node = getattr(event, "node", None)
    return node if isinstance(node, str) else None


def evaluation_text(event: EvaluationReadyEvent) -> str:
    """An evaluation in one line."""
    metrics = metrics_text(event.metric_name, event.metric, event.further_metrics)
    samples = f" on {several(event.samples, 'sample')}" if event.samples else ""
    rounds = several(event.round, "round")
    return f"after {rounds}: {metrics}, held-out loss {score(event.loss)}{samples}"


def weighing_note(event: AggregateReadyEvent, names: Mapping[str, str]) -> str:
    """Who did not count in a round, or that the job went back; empty: all counted."""
    weights, number = event.weighing, event.round + 1
    if weights is None:
        return ""
    if weights.rollback:
        reason = round_from_one(weights.rollback)
        return f"round {number}: the job went back to the model before: {reason}"
    uncounted_nodes = [node for node, vote in weights.votes.items() if not vote]
    clauses = [
        f"{names.get(node) or short(node)} did not count: "
        f"{round_from_one(weights.reasons.get(node, ''))}"
        for node in uncounted_nodes[:_NAMED_MOST]
    ]
    if len(uncounted_nodes) > _NAMED_MOST:
        clauses.append(f"{len(uncounted_nodes) - _NAMED_MOST} more did not count")
    return f"round {number}: {'; '.join(clauses)}" if clauses else ""


def _aggregate_text(event: AggregateReadyEvent, names: Mapping[str, str]) -> str:
    return weighing_note(event, names) or f"the model of round {event.round + 1} is ready"


def plan_changes(
    plan: JournalledPlan, before: JournalledPlan | None, names: Mapping[str, str]
) -> Iterator[str]:
    """A line for each node whose steps, batch, codec or part changed; a first plan's reason."""
    number = plan.round + 1
    if before is None:
        yield f"round {number}: {round_from_one(plan.reason)}"
        return
    earlier = before.parts
    for node, part in plan.parts.items():
        if node not in earlier or earlier[node].work != part.work:
            rests = "" if part.inner_steps else "rests: "
            reason = f"{rests}{round_from_one(part.reason)}"
            yield f"round {number}, {names.get(node) or short(node)}: {reason}"
