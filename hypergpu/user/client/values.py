"""Answers of a coordinator as frozen values, the schemas of ``--json`` that hold them, and their
translation from the wire. Fields are only added, never renamed or removed.
"""

import json
import math
from functools import cached_property
from typing import TypeVar

import msgspec
from google.protobuf.message import Message

from hypergpu.digests import digest_from_wire, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.journal.events import read_event
from hypergpu.journal.public_event import PublicEvent
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json
from hypergpu.user.client.bundle_progress import BundlesView, bundles_view
from hypergpu.user.client.forecasts import JobForecastView, forecast_view
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.credentials import Role

ENDED = frozenset({"finished", "stopped", "failed"})
"""Phases that a job does not leave."""


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
    updates_rejected: int
    samples: int
    model: str | None
    at_ms: int
    owner: str = ""
    """Id of the token that created it."""
    metrics: dict[str, float] = {}
    """Further metrics of the newest evaluation by name."""
    evaluated_samples: int = 0
    """Held-out samples that it measured; 0: not told."""
    planned_samples: int = 0
    """Samples of a planned job in all, in as many rounds as plans make; 0: it has stated rounds."""
    bundles: BundlesView | None = None
    """Progress of a farm job; null: the job is of another kind."""


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
    phase: str = ""
    """download, train, wait or upload while its update is awaited; empty when it is not known."""


class EstimateView(msgspec.Struct, frozen=True):
    """A quantity that wanders."""

    mean: float
    spread: float
    """Mean deviation; of a loss its standard deviation."""
    samples: int
    """0: inferred from others."""
    age_ms: int


class ReadingView(msgspec.Struct, frozen=True):
    """A node's line and speed; null is not known yet."""

    round_trip_us: EstimateView | None
    least_round_trip_us: int | None
    """Least round trip of the last minutes: the link without queues."""
    loss: EstimateView | None
    """Share of packets."""
    up_bits_per_s: EstimateView | None
    down_bits_per_s: EstimateView | None
    step_us: EstimateView | None
    congestion_control: str | None
    """Congestion control of the node's sockets."""


class HealthView(msgspec.Struct, frozen=True):
    """A node's health and its parts, each in [0, 1]."""

    value: float
    """0.4 speed + 0.3 reliability + 0.2 quality + 0.1 uptime."""
    level: str
    """``high`` from 0.8, ``normal`` from 0.5, ``low`` from 0.3, else ``poor``."""
    speed: float
    reliability: float
    quality: float
    uptime: float
    reason: str
    """What lowers it most, or why the node is excluded and for how long."""
    excluded_until_s: int
    """Unix time; 0: it is not excluded."""


class HealthHistoryView(msgspec.Struct, frozen=True):
    """The health of up to a day."""

    step_minutes: int
    """Minutes from one point to the next."""
    points: tuple[float | None, ...]
    """The newest last, at most 240; null: no coordinator looked."""


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
    updates_rejected: int
    reading: ReadingView
    health: HealthView
    health_history: HealthHistoryView
    plan_reason: str
    """What the newest plan that named it says of its part; empty: none did."""
    name: str = ""
    """What its owner calls the machine."""
    pause_reason: str = ""
    """By whom it is paused, also while it is away; empty: it is not."""
    caps: dict[str, int] = {}
    """Limits that its owner set; those that are not set are left out."""
    sandbox: str = ""
    """Sandbox of its worker: ``bwrap``, ``landlock``, or ``unsandboxed`` with reason and fix."""
    labels: dict[str, str] = {}
    """Labels that its owner gave it."""
    processors: int = 0
    machine_memory_bytes: int = 0
    data_names: tuple[str, ...] = ()
    """Data sets of its own that jobs may train on there."""
    trust_labels: tuple[str, ...] = ()
    """Labels that operators gave it."""

    @property
    def is_gone(self) -> bool:
        """Whether it does not come back by itself."""
        return self.state in {"lost", "revoked"}


class NodeLevelsView(msgspec.Struct, frozen=True):
    """What changes from second to second about a node; null is not known yet."""

    id: str
    state: str
    reason: str
    job: str | None
    health: HealthView
    """Its numbers to two digits."""
    plan_reason: str
    round_trip_us: int | None
    round_trip_spread_us: int | None
    loss: float | None
    """Share of packets."""
    up_bits_per_s: int | None
    down_bits_per_s: int | None
    step_us: int | None
    round: int | None
    """Its job's open round, where it takes part in it."""
    participant: ParticipantView | None
    """Its work in that round, without reason and name."""


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


class JobDetail(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/job/1"):
    """`job show`."""

    job: JobView
    spec: dict[str, object]
    participants: list[ParticipantView]
    model_bytes: int
    unfit: list["UnfitNodeView"] = []
    """Connected nodes that do not meet what the job requires of its nodes."""
    takeover: str = ""
    """Sentence on the takeover since which its coordinator drives it; empty: there was none."""
    notes: tuple[str, ...] = ()
    """What a user should know of how data and model are used."""
    forecast: JobForecastView | None = None
    """What it takes until its end; null: it was not asked for, or nothing can be said."""


class UnfitNodeView(msgspec.Struct, frozen=True):
    """A node that a job cannot have."""

    id: str
    name: str
    reason: str


class JobEvent(msgspec.Struct, frozen=True, dict=True, tag_field="schema", tag="hypergpu/event/1"):
    """One line of `job watch`."""

    sequence: int
    at_ms: int
    kind: str
    body: dict[str, object]

    @cached_property
    def content(self) -> PublicEvent | None:
        """The event with its fields' types; None where this version cannot read it."""
        return read_event(self.kind, self.body)


class TokenMade(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/token/1"):
    """`token create`."""

    id: str
    role: str
    token: str


class RoundProgress(msgspec.Struct, frozen=True):
    """How far each participant of the open round is; sent a few times a second, not journalled."""

    participants: tuple[ParticipantView, ...]


JobUpdate = JobEvent | RoundProgress
"""What a watched job sends."""


class ModelHeader(msgspec.Struct, frozen=True):
    """A model to fetch."""

    digest: Digest
    size_bytes: int
    layout: Layout
    card: str


ROLES = {
    Role.NODE: job_pb2.TOKEN_ROLE_NODE,
    Role.VIEWER: job_pb2.TOKEN_ROLE_VIEWER,
    Role.USER: job_pb2.TOKEN_ROLE_USER,
    Role.OPERATOR: job_pb2.TOKEN_ROLE_OPERATOR,
}
_View = TypeVar("_View", bound=msgspec.Struct)
_ROLE_NAMES = {number: role.value for role, number in ROLES.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hex(digest: tensor_pb2.Digest) -> str | None:
    return digest.value.hex() or None


def view_of(kind: type[_View], message: Message, **given: object) -> _View:
    """A value of fields named like the message's, but for those that are given."""
    names = set(kind.__struct_fields__) - given.keys()
    return kind(**{name: getattr(message, name) for name in names}, **given)


def job_view(job: job_pb2.JobSummary) -> JobView:
    """A job from the wire."""
    return view_of(
        JobView,
        job,
        id=job.job_id,
        loss=_finite(job.loss),
        metric=_finite(job.metric),
        metrics=dict(job.metrics),
        model=_hex(job.model),
        bundles=bundles_view(job.bundles) if job.HasField("bundles") else None,
    )


def participant_view(participant: job_pb2.ParticipantSummary) -> ParticipantView:
    """A participant from the wire."""
    loss = _finite(participant.loss)
    return view_of(ParticipantView, participant, node=participant.node_id, loss=loss)


def job_detail(found: job_pb2.GetJobResponse) -> JobDetail:
    """`job show` from the wire."""
    return JobDetail(
        job=job_view(found.job),
        spec=msgspec.json.decode(found.spec_json or "{}", type=dict[str, object]),
        participants=[participant_view(each) for each in found.participants],
        model_bytes=found.model.blob.size_bytes,
        unfit=[UnfitNodeView(each.node_id, each.name, each.reason) for each in found.unfit],
        takeover=found.takeover,
        notes=tuple(found.notes),
        forecast=forecast_view(found.forecast) if found.HasField("forecast") else None,
    )


def node_view(node: job_pb2.NodeSummary) -> NodeView:
    """A node from the wire."""
    able = node.capabilities
    names = set(NodeView.__struct_fields__) & set(able.DESCRIPTOR.fields_by_name)
    capabilities = {name: getattr(able, name) for name in names} | {
        "workloads": {each.name: each.version for each in able.workloads},
        "caps": {field.name: value for field, value in able.caps.ListFields()},
        "labels": dict(able.labels),
        "data_names": tuple(able.data_names),
        "trust_labels": tuple(node.trust_labels),
    }
    return view_of(
        NodeView,
        node,
        id=node.node_id,
        job=node.job_id or None,
        reading=reading_view(node.reading),
        health=view_of(HealthView, node.health),
        health_history=health_history_view(node.health_history),
        **capabilities,
    )


_LINE = (
    *("round_trip_us", "round_trip_spread_us", "loss", "up_bits_per_s", "down_bits_per_s"),
    "step_us",
)


def node_levels_view(levels: job_pb2.NodeLevels) -> NodeLevelsView:
    """A node's levels from the wire."""
    takes_part = levels.HasField("participant")
    present_fields = {field.name: value for field, value in levels.ListFields()}
    return view_of(
        NodeLevelsView,
        levels,
        id=levels.node_id,
        job=levels.job_id or None,
        health=view_of(HealthView, levels.health),
        round=levels.round if takes_part else None,
        participant=participant_view(levels.participant) if takes_part else None,
        **{name: present_fields.get(name) for name in _LINE},
    )


def token_view(token: job_pb2.TokenSummary) -> TokenView:
    """A token from the wire."""
    return view_of(
        TokenView,
        token,
        id=token.token_id,
        role=_ROLE_NAMES.get(token.role, "unknown"),
        expires_in_s=token.expires_in_s if token.expires_in_s or token.is_expired else None,
        uses_left=None if token.is_unlimited else token.uses_left,
    )


def job_event(event: job_pb2.JobEvent) -> JobEvent:
    """An event from the wire."""
    return view_of(JobEvent, event, body=event_body(event))


def health_history_view(history: job_pb2.HealthHistory) -> HealthHistoryView:
    """A health's history from the wire."""
    points = tuple(None if point == _NO_LOOK else point / 100 for point in history.points)
    return HealthHistoryView(history.step_minutes, points)


_NO_LOOK = 255


def reading_view(reading: job_pb2.Reading) -> ReadingView:
    """A reading from the wire."""
    estimates = {
        name: view_of(EstimateView, estimate) if estimate.samples or estimate.mean else None
        for name in ("round_trip_us", "loss", "up_bits_per_s", "down_bits_per_s", "step_us")
        for estimate in [getattr(reading, name)]
    }
    least_us = reading.least_round_trip_us or None
    control = reading.congestion_control or None
    return ReadingView(**estimates, least_round_trip_us=least_us, congestion_control=control)


def event_body(event: job_pb2.JobEvent) -> dict[str, object]:
    """Fields of an event."""
    fields = json.loads(event.body_json or "{}")
    return fields if isinstance(fields, dict) else {}


def job_update(message: job_pb2.WatchJobResponse) -> JobUpdate:
    """A message of a watched job."""
    if message.HasField("event"):
        return job_event(message.event)
    return RoundProgress(tuple(participant_view(each) for each in message.progress.participants))


def blob_ref(digest: Digest, size_bytes: int) -> tensor_pb2.BlobRef:
    """Name of a blob on the wire."""
    wire = tensor_pb2.Digest(value=digest_to_wire(digest))
    return tensor_pb2.BlobRef(digest=wire, size_bytes=size_bytes)


def model_header(message: job_pb2.ResolveModelResponse) -> ModelHeader:
    """A model to fetch.

    Raises:
        HyperGPUError: CALL_BROKEN, the answer contradicts itself.
    """
    try:
        layout = layout_from_json(message.layout_json)
    except LayoutError as error:
        raise HyperGPUError(Reason.CALL_BROKEN, f"the model's layout: {error}") from error
    if layout.model_bytes != message.blob.size_bytes:
        detail = f"a model of {message.blob.size_bytes} bytes with a layout of {layout.model_bytes}"
        raise HyperGPUError(Reason.CALL_BROKEN, detail)
    digest = digest_from_wire(message.blob.digest.value)
    return ModelHeader(digest, message.blob.size_bytes, layout, message.model_card)


class Jobs(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/jobs/1"):
    """`job ls`."""

    jobs: list[JobView]


class Submitted(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/submitted/1"):
    """`job submit`."""

    job: str


class Nodes(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/nodes/1"):
    """`node ls`."""

    nodes: list[NodeView]


class NodeDetail(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/node/1"):
    """`node show`."""

    node: NodeView


class Tokens(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/tokens/1"):
    """`token ls`."""

    tokens: list[TokenView]


class Exported(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/exported/1"):
    """`job export`."""

    model: str
    card: str
    loader: str
    digest: str
    size_bytes: int
    gguf: str = ""
    """File for llama.cpp; empty: none was asked for."""
    onnx: str = ""
    """The same for ONNX."""
