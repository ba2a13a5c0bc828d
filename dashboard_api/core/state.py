"""Types of the feed's state. The state is a JSON tree; these give its schema and defaults."""

from typing import Annotated, Any, Literal

import msgspec

NodePhase = Literal["download", "train", "encode", "upload", "wait", "pause", "rest"]
LaneOutcome = Literal["pending", "accepted", "rejected", "handed_back", "lost", "resting"]
HealthWord = Literal["high", "normal", "low", "poor"]
LATER = msgspec.Meta(extra={"is_later": True})
"""Marks fields that recordings of older versions lack."""
ROUNDS_KEPT = 200
LANES_KEPT = 2_000
"""Most lanes of all rounds of a job in the state: a snapshot stays below a megabyte."""
EVENTS_KEPT = 200
REJECTIONS_KEPT = 20
OUTPUTS_KEPT = 100
"""Evaluations whose output is in the state: 60 kB at most."""


class Segment(msgspec.Struct, forbid_unknown_fields=True):
    """A phase of a node's work."""

    phase: NodePhase
    start_ms: int
    end_ms: int | None


class Lane(msgspec.Struct, forbid_unknown_fields=True):
    """A node's part of a round."""

    slot: int = 0
    reason: str = ""
    inner_steps: int = 0
    batch: int = 0
    codec: str = ""
    forecast_ms: int | None = None
    forecast_spread_ms: int | None = None
    segments: list[Segment] = []
    is_estimate: bool = True
    """Whether the borders between segments are the server's estimate, not the node's report."""
    result: LaneOutcome = "pending"
    result_reason: str = ""
    loss: float | None = None
    update_bytes: int = 0
    quality_bps: int | None = None


class EvaluationState(msgspec.Struct, forbid_unknown_fields=True):
    """What a model scores on held-out samples."""

    loss: float | None = None
    metric: float | None = None
    metrics: dict[str, float] = {}
    """Further metrics by name."""
    samples: int = 0
    """Held-out samples that were measured; 0: not told."""
    samples_all: int = 0


class RoundState(msgspec.Struct, forbid_unknown_fields=True):
    """A round; ``number`` counts from 0."""

    number: int
    started_at_ms: int
    ended_at_ms: int | None = None
    deadline_at_ms: int | None = None
    updates_needed: int = 0
    """Updates without which the round does not close at its deadline, as journalled: as it opened,
    and of a round that has closed, as it closed. 0: not known.
    """
    reason: str = ""
    lanes: dict[str, Lane] = {}
    duration_ms: int | None = None
    samples: int = 0
    samples_per_s: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float | None = None
    metric: float | None = None
    held_out_loss: Annotated[float | None, LATER] = None
    metrics: Annotated[dict[str, float], LATER] = {}
    """Further metrics by name."""
    forecast_error: float | None = None


class NodeLevel(msgspec.Struct, forbid_unknown_fields=True):
    """A participant's progress in the open round."""

    state: str = ""
    phase: NodePhase = "download"
    steps_done: int = 0
    steps_total: int = 0
    loss: float | None = None
    reason: str = ""


class EventLine(msgspec.Struct, forbid_unknown_fields=True):
    """An event in a sentence."""

    sequence: int
    at_ms: int
    kind: str
    text: str
    node: str | None = None
    round: int | None = None


class ExampleState(msgspec.Struct, forbid_unknown_fields=True):
    """A held-out sample: the beginning of a text, or an image as a data URL."""

    text: str = ""
    image: str = ""
    label: str = ""


class OutputSample(msgspec.Struct, forbid_unknown_fields=True):
    """The model's output for each of the job's examples at an evaluation."""

    round: int
    """How many rounds made the model."""
    at_ms: int
    outputs: list[str]


class NodePay(msgspec.Struct, forbid_unknown_fields=True):
    """A node's account in a job; amounts are decimal text in the token's smallest unit."""

    receipts: int = 0
    worth: str = "0"
    paid: str = "0"
    allotted: str = "0"


class TransactionLine(msgspec.Struct, forbid_unknown_fields=True):
    """A transaction of a job."""

    hash: str
    purpose: str
    state: str
    block: int
    confirmations: int


class PaymentsState(msgspec.Struct, forbid_unknown_fields=True):
    """Receipts and settlement of a job."""

    receipts: int = 0
    score: int = 0
    worth: str = "0"
    paid: str = "0"
    escrow: str = "0"
    halted: str = ""
    nodes: dict[str, NodePay] = {}
    transactions: list[TransactionLine] = []


class NodeContribution(msgspec.Struct, forbid_unknown_fields=True):
    """A node's accepted and measured work in a job."""

    samples: int = 0
    compute_ms: int = 0


class OpenRunState(msgspec.Struct, forbid_unknown_fields=True):
    """Items that were given out and are not settled."""

    start: int
    items: int


class FarmNodeState(msgspec.Struct, forbid_unknown_fields=True):
    """A node's accepted work in a farm job."""

    bundles: int = 0
    items: int = 0
    units: int = 0
    failures: int = 0
    """Items with a reason in place of a value."""
    handed_back: int = 0
    """Bundles that it gave back undone."""
    doubts: int = 0
    """Results that others outvoted."""
    items_per_s: float | None = None
    """Between its newest results; null: it has not returned two."""
    at_ms: int = 0
    """When its newest result was accepted; 0: never."""


class FarmState(msgspec.Struct, forbid_unknown_fields=True):
    """Progress of a job of independent items. No text or value of an item is in it."""

    item_kind: str = ""
    items: int = 0
    unit: str = ""
    settled_items: int = 0
    failed_items: int = 0
    units: int = 0
    credited_units: int = 0
    """Work that nodes have receipts for: accepted, and that of results which confirmed it."""
    open_bundles: int = 0
    """Bundles that nodes have now."""
    tile_items: int = 1
    """Items of a tile: runs of so many from the first on."""
    settled_by_tile: dict[str, int] = {}
    """Settled items by the tile's number; 0 where it is not there."""
    doubted_by_tile: dict[str, int] = {}
    """Results that others outvoted, by the tile of the bundle's first item."""
    open_runs: list[OpenRunState] = []
    """1,000 at most."""
    nodes: dict[str, FarmNodeState] = {}


class JobState(msgspec.Struct, forbid_unknown_fields=True):
    """A job."""

    id: str
    name: str = ""
    owner: str = ""
    workload: str = ""
    phase: str = "preparing"
    reason: str = ""
    round: int = 0
    rounds: int = 0
    nodes: int = 0
    created_at_ms: int = 0
    """0: its journal was not read yet."""
    ended_at_ms: int | None = None
    loss: float | None = None
    metric: float | None = None
    metric_name: str = ""
    target_mode: Annotated[str, LATER] = ""
    """``min`` where the metric falls as the model learns, else ``max``; empty: not known."""
    initial: Annotated[EvaluationState | None, LATER] = None
    """Evaluation of the model before any training; None: there was none."""
    bytes_up: int = 0
    bytes_down: int = 0
    naive_bytes: int = 0
    """Traffic of the same steps when each one exchanges the uncompressed gradient and model."""
    updates_accepted: int = 0
    updates_rejected: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    eta_ms: int | None = None
    model: str | None = None
    model_bytes: int = 0
    score: int = 0
    """Accepted samples times their quality in 1/10,000."""
    spec: dict[str, Any] = {}
    unit_price: str = "0"
    escrow: str = "0"
    cost: str = "0"
    decimals: int = 18
    rounds_by_number: dict[str, RoundState] = {}
    training: str = ""
    """The training whose model is served: ``round`` is then the rounds after which its newest
    version is. Empty: the job serves no training's.
    """
    levels: dict[str, NodeLevel] = {}
    work: Annotated[dict[str, NodeContribution], LATER] = {}
    events: list[EventLine] = []
    examples: Annotated[list[ExampleState], LATER] = []
    """Held-out samples that people see; none where the workload shows none."""
    samples_of_output: list[OutputSample] = []
    payments: PaymentsState | None = None
    farm: Annotated[FarmState | None, LATER] = None
    """Progress of a job of independent items; null: the job is of another kind."""


class Rejection(msgspec.Struct, forbid_unknown_fields=True):
    """An update that was not accepted."""

    at_ms: int
    job: str
    round: int
    reason: str


class ConnectionGap(msgspec.Struct, forbid_unknown_fields=True):
    """A time without a connection, too short or too idle for a job to lose the node."""

    from_ms: int
    to_ms: int | None = None
    """None: it lasts."""


class HealthPartsState(msgspec.Struct, forbid_unknown_fields=True):
    """Parts of a node's health, each in [0, 1]."""

    speed: float
    reliability: float
    quality: float
    uptime: float


class NodeState(msgspec.Struct, forbid_unknown_fields=True):
    """A node. Readings are null until they are measured."""

    id: str
    name: str = ""
    owner: str = ""
    state: str = ""
    reason: str = ""
    device: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    worker: str = ""
    job: str | None = None
    seen_at_ms: int | None = None
    software: str = ""
    health: HealthWord | None = None
    """Its level."""
    health_value: Annotated[float | None, LATER] = None
    """In [0, 1]."""
    health_reason: Annotated[str, LATER] = ""
    """What lowers it most, or why the node is excluded."""
    health_parts: Annotated[HealthPartsState | None, LATER] = None
    plan_reason: Annotated[str, LATER] = ""
    """What the newest plan that named it says of its part."""
    pause_reason: Annotated[str, LATER] = ""
    updates_accepted: int = 0
    updates_rejected: int = 0
    rejections: list[Rejection] = []
    absences: Annotated[list[ConnectionGap], LATER] = []
    """Newest ones that this server saw, oldest first."""
    rtt_us: int | None = None
    rtt_spread_us: int | None = None
    loss: float | None = None
    up_bits_per_s: int | None = None
    down_bits_per_s: int | None = None
    step_us: int | None = None
    congestion_control: str | None = None
    inner_steps: int | None = None
    codec: str | None = None
    batch: int | None = None
    forecast_error: float | None = None
    earned: str = "0"
    joined_at_ms: int | None = None
    caps: dict[str, int] | None = None
    """Limits that its owner set; those that are not set are left out."""


class AlertState(msgspec.Struct, forbid_unknown_fields=True):
    """Something that a person should act on, with what to do."""

    kind: str
    severity: Literal["warning", "critical"]
    title: str
    reason: str
    fix: str
    job: str | None
    node: str | None
    at_ms: int


class CoordinatorState(msgspec.Struct, forbid_unknown_fields=True):
    """The connection to the coordinator."""

    address: str = ""
    is_reachable: bool = False
    reason: str = "connecting"
    at_ms: int = 0


class FeedState(msgspec.Struct, forbid_unknown_fields=True):
    """The whole state."""

    coordinator: CoordinatorState
    jobs: dict[str, JobState] = {}
    nodes: dict[str, NodeState] = {}
    alerts: dict[str, AlertState] = {}


def empty_state(address: str) -> dict[str, Any]:
    """State before anything is known, as a JSON tree."""
    tree: dict[str, Any] = msgspec.to_builtins(FeedState(CoordinatorState(address)))
    return tree
