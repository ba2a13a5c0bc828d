"""A watched job as its events tell it: a pure fold. It knows the events' names, not the machine."""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from hypergpu.client.history import History, with_event_recorded
from hypergpu.client.values import JobEvent, JobView, ParticipantView
from hypergpu.terminal.figures import short

NOTES_KEPT = 1000


class NodeShare(msgspec.Struct, frozen=True):
    """A node's part of a round; without inner steps it rests."""

    inner_steps: int = 0
    codec: str = ""
    reason: str = ""
    batch_size: int = 0
    """The node's own batch; 0: as the job states."""

    @property
    def work(self) -> tuple[int, int, str]:
        """What the node is asked for."""
        return self.inner_steps, self.batch_size, self.codec


class PlanView(msgspec.Struct, frozen=True):
    """A round's plan as its event tells it. ``round`` counts from 0."""

    round: int = 0
    reason: str = ""
    nodes: dict[str, NodeShare] = {}
    resting: dict[str, str] = {}
    """Why a node rests, by node."""

    @property
    def shares(self) -> dict[str, NodeShare]:
        """Every node's part, also of those that rest."""
        return self.nodes | {node: NodeShare(reason=why) for node, why in self.resting.items()}


class JobProgress(msgspec.Struct, frozen=True):
    """What a watcher knows."""

    job: JobView | None = None
    participants: tuple[ParticipantView, ...] = ()
    history: History = History()
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
    progress: JobProgress, job: JobView, participants: tuple[ParticipantView, ...]
) -> JobProgress:
    """Add the newest summary, asked for beside the stream."""
    return with_participants(replace(progress, job=job), participants)


def with_note(progress: JobProgress, text: str) -> JobProgress:
    """Add a line that the journal does not tell."""
    return replace(progress, notes=(*progress.notes, text)[-NOTES_KEPT:])


def with_participants(
    progress: JobProgress, participants: tuple[ParticipantView, ...]
) -> JobProgress:
    """Add conflated progress of the open round; between rounds the last one's stays."""
    if not participants:
        return progress
    named = {each.node: each.name for each in participants if each.name}
    return replace(progress, participants=participants, names=progress.names | named)


def with_event(progress: JobProgress, event: JobEvent) -> JobProgress:
    """Add one journalled event."""
    if event.kind == "RoundPlanned":
        plan = msgspec.convert(event.body.get("plan") or {}, PlanView)
        news = tuple(_plan_news(plan, progress.plan, progress.names))
        progress = replace(progress, plan=plan, plan_news=news)
    if text := event_note(event):
        progress = with_note(progress, text)
    history = with_event_recorded(progress.history, event)
    return replace(progress, history=history, next_sequence=event.sequence + 1)


def _plan_news(plan: PlanView, before: PlanView | None, names: Mapping[str, str]) -> Iterator[str]:
    """A line for each node whose steps, batch, scheme or part changed; a first plan's reason."""
    number = plan.round + 1
    if before is None:
        yield f"round {number}: {plan.reason}"
        return
    earlier = before.shares
    for node, share in plan.shares.items():
        if node not in earlier or earlier[node].work != share.work:
            rests = "" if share.inner_steps else "rests: "
            yield f"round {number}, {names.get(node) or short(node)}: {rests}{share.reason}"


_NOTES = {
    "NodeJoined": "node {node} joined",
    "NodeLost": "node {node} lost: {reason}",
    "NodeDraining": "node {node} drains: {reason}",
    "UpdateRejected": "update of {node} refused: {reason}",
    "ShardHandedBack": "node {node} handed its shard back: {reason}",
    "DeadlineReached": "round {round} reached its deadline",
    "ModelInitialised": "the initial model is ready",
    "PreparationFailed": "the initial model could not be made",
    "ModelLost": "the model's bytes were damaged: {reason}",
    "EvaluationFailed": "evaluation failed: {reason}",
    "JobPaused": "paused",
    "JobResumed": "resumed",
    "JobStopped": "stopped",
    "ParametersChanged": "parameters changed",
}


def event_note(event: JobEvent) -> str:
    """An event in a sentence, when it is worth one to a watcher."""
    fields = event.body
    number = fields.get("round")
    return _NOTES.get(event.kind, "").format(
        node=short(str(fields.get("node", ""))),
        reason=str(fields.get("reason", "")),
        round=number + 1 if isinstance(number, int) else 1,
    )
