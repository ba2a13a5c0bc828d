"""Answers as plain data: the schema of every ``--json`` (docs/cli.md). Fields are only added."""

import math

import msgspec

from hypergpu.client.calls import body
from hypergpu.client.readings import ReadingView, reading_view
from hypergpu.v1 import job_pb2, tensor_pb2


class JobView(msgspec.Struct, frozen=True):
    """A job's newest figures."""

    id: str
    name: str
    phase: str
    reason: str
    round: int
    rounds: int
    nodes: int
    loss: float | None
    metric: float | None
    metric_name: str
    bytes_up: int
    bytes_down: int
    updates_accepted: int
    updates_refused: int
    samples: int
    model: str | None
    at_ms: int


class ParticipantView(msgspec.Struct, frozen=True):
    """A node's work in the open round."""

    node: str
    slot: int
    state: str
    steps_done: int
    steps_total: int
    loss: float | None
    reason: str
    name: str
    """What its owner calls the machine; empty when the coordinator cannot tell."""


class NodeView(msgspec.Struct, frozen=True):
    """A node as the operator sees it."""

    id: str
    state: str
    reason: str
    device: str
    device_name: str
    memory_bytes: int
    worker: str
    workloads: dict[str, int]
    job: str | None
    last_seen_ms_ago: int
    software: str
    updates_accepted: int
    updates_refused: int
    reading: ReadingView
    health: float | None
    """In [0, 1], for people; null: nothing measured yet."""
    health_reason: str
    name: str = ""
    """What its owner calls the machine."""


class TokenView(msgspec.Struct, frozen=True):
    """A token without its secret."""

    id: str
    role: str
    label: str
    expires_in_s: int | None
    """None: never; 0: it has."""
    uses_left: int | None
    """None: as many as one likes."""
    is_revoked: bool


class Jobs(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/jobs/1"):
    """`job ls`."""

    jobs: list[JobView]


class JobDetail(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/job/1"):
    """`job show`."""

    job: JobView
    spec: dict[str, object]
    participants: list[ParticipantView]
    model_bytes: int


class Submitted(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/submitted/1"):
    """`job submit`."""

    job: str


class EventLine(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/event/1"):
    """One line of `job watch`."""

    sequence: int
    at_ms: int
    kind: str
    body: dict[str, object]


class Exported(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/exported/1"):
    """`job export`."""

    model: str
    card: str
    digest: str
    size_bytes: int


class Nodes(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/nodes/1"):
    """`node ls`."""

    nodes: list[NodeView]


class NodeDetail(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/node/1"):
    """`node show`."""

    node: NodeView


class Tokens(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/tokens/1"):
    """`token ls`."""

    tokens: list[TokenView]


class TokenMade(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/token/1"):
    """`token create`."""

    id: str
    role: str
    token: str


_ROLE_NAMES = {
    job_pb2.TOKEN_ROLE_NODE: "node",
    job_pb2.TOKEN_ROLE_USER: "user",
    job_pb2.TOKEN_ROLE_OPERATOR: "operator",
}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hex(digest: tensor_pb2.Digest) -> str | None:
    return digest.value.hex() or None


def job_view(job: job_pb2.JobSummary) -> JobView:
    """A job from the wire."""
    return JobView(
        id=job.job_id,
        name=job.name,
        phase=job.phase,
        reason=job.reason,
        round=job.round,
        rounds=job.rounds,
        nodes=job.nodes,
        loss=_finite(job.loss),
        metric=_finite(job.metric),
        metric_name=job.metric_name,
        bytes_up=job.bytes_up,
        bytes_down=job.bytes_down,
        updates_accepted=job.updates_accepted,
        updates_refused=job.updates_refused,
        samples=job.samples,
        model=_hex(job.model),
        at_ms=job.at_ms,
    )


def participant_view(participant: job_pb2.ParticipantSummary) -> ParticipantView:
    """A participant from the wire."""
    return ParticipantView(
        node=participant.node_id,
        slot=participant.slot,
        state=participant.state,
        steps_done=participant.steps_done,
        steps_total=participant.steps_total,
        loss=_finite(participant.loss),
        reason=participant.reason,
        name=participant.name,
    )


def job_detail(found: job_pb2.GetJobResponse) -> JobDetail:
    """`job show` from the wire."""
    return JobDetail(
        job=job_view(found.job),
        spec=msgspec.json.decode(found.spec_json or "{}", type=dict[str, object]),
        participants=[participant_view(each) for each in found.participants],
        model_bytes=found.model.blob.size_bytes,
    )


def node_view(node: job_pb2.NodeSummary) -> NodeView:
    """A node from the wire."""
    able = node.capabilities
    return NodeView(
        id=node.node_id,
        state=node.state,
        reason=node.reason,
        device=able.device,
        device_name=able.device_name,
        memory_bytes=able.memory_bytes,
        worker=able.worker,
        workloads={each.name: each.version for each in able.workloads},
        job=node.job_id or None,
        last_seen_ms_ago=node.last_seen_ms_ago,
        software=node.software,
        updates_accepted=node.updates_accepted,
        updates_refused=node.updates_refused,
        reading=reading_view(node.reading),
        health=node.health if node.health_reason else None,
        health_reason=node.health_reason,
        name=able.name,
    )


def token_view(token: job_pb2.TokenSummary) -> TokenView:
    """A token from the wire."""
    return TokenView(
        id=token.token_id,
        role=_ROLE_NAMES.get(token.role, "unknown"),
        label=token.label,
        expires_in_s=token.expires_in_s if token.expires_in_s or token.is_expired else None,
        uses_left=None if token.is_unlimited else token.uses_left,
        is_revoked=token.is_revoked,
    )


def event_line(event: job_pb2.JobEvent) -> EventLine:
    """An event from the wire."""
    return EventLine(sequence=event.sequence, at_ms=event.at_ms, kind=event.kind, body=body(event))
