"""Answers of a coordinator as frozen values, and the schemas of ``--json`` that hold them.

Fields are only added, never renamed or removed.
"""

import msgspec

from hypergpu.ids import Digest
from hypergpu.tensors.layout import Layout

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
    health: str | None
    """Band in the newest planned round: high, normal, low or poor; null: no plan named the node."""
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


class JobDetail(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/job/1"):
    """`job show`."""

    job: JobView
    spec: dict[str, object]
    participants: list[ParticipantView]
    model_bytes: int


class JobEvent(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/event/1"):
    """One line of `job watch`."""

    sequence: int
    at_ms: int
    kind: str
    body: dict[str, object]


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
    """The model that a stream of chunks holds."""

    digest: Digest
    size_bytes: int
    layout: Layout
    card: str


class ModelChunk(msgspec.Struct, frozen=True):
    """Some of a model's flat bytes."""

    offset: int
    payload: bytes
