"""Public events of a job's journal, as every reader outside of the coordinator's core has them.

The coordinator's own events (`training.job.events`) may say more than these. A kind that a
newer version added, and fields that it added to a kind, are passed over; what an older version did
not write has its default. So a class here only grows, by fields with defaults. Rounds count from 0.

Pay depends on some fields: those have no default, so that a row without one is an error and never
work without a price.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.ids import JobId
from hypergpu.journal.farm_events import FARM_EVENTS
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.public_event import PublicEvent
from hypergpu.journal.serving_events import SERVING_EVENTS
from hypergpu.ledger_terms import Terms
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.entry import HeldOutExample


class JournalledModel(msgspec.Struct, frozen=True):
    """Parameters after some rounds."""

    blob: BlobRef
    round: int = 0
    """How many rounds made it."""


class JobCreatedEvent(PublicEvent, frozen=True):
    """A user asked for the job."""

    job_id: JobId
    spec: dict[str, Any]
    """The job's description as JSON: a reader need not know all of its keys."""
    terms: Terms = Terms()
    manifest: BlobRef | None = None
    """Description of the job's data."""


class ModelInitialisedEvent(PublicEvent, frozen=True):
    """The first model was made."""

    model: JournalledModel
    workload_version: int = 1
    examples: tuple[HeldOutExample, ...] = ()
    """Held-out samples for which each evaluation tells the model's output."""
    target_mode: str = ""
    """``min`` or ``max``: whether the metric falls or rises to a target; empty: it is not told."""


class PreparationFailedEvent(PublicEvent, frozen=True):
    """No first model can be made."""

    reason: str = ""


class NodeJoinedEvent(PublicEvent, frozen=True):
    """A node works for the job from now on."""

    node: str


class NodeLostEvent(PublicEvent, frozen=True):
    """A node was not heard of for too long, or left."""

    node: str
    reason: str = ""


class NodeDrainingEvent(PublicEvent, frozen=True):
    """A node finishes its work and takes no more of it."""

    node: str
    reason: str = ""


class NodePausedEvent(PublicEvent, frozen=True):
    """A node dropped its work because its owner or an operator paused it."""

    node: str
    reason: str = ""


class NodeReadmittedEvent(PublicEvent, frozen=True):
    """An operator took a node back that the job had banned."""

    node: str


class NodePart(msgspec.Struct, frozen=True):
    """A node's part of a planned round; without inner steps it rests."""

    inner_steps: int = 0
    codec: str = ""
    reason: str = ""
    batch_size: int = 0
    """The node's own batch; 0: as the job states."""
    micro_batch: int = 0
    checkpoints_activations: bool = False
    forecast_ms: Milliseconds = Milliseconds(0)
    """Mean time until its update is in; 0: nothing is known of the node."""
    spread_ms: Milliseconds = Milliseconds(0)

    @property
    def work(self) -> tuple[int, int, int, bool, str]:
        """Work that the node is asked for."""
        memory = (self.micro_batch, self.checkpoints_activations)
        return self.inner_steps, self.batch_size, *memory, self.codec


class JournalledPlan(msgspec.Struct, frozen=True):
    """A round's plan."""

    round: int
    reason: str = ""
    nodes: dict[str, NodePart] = {}
    resting: dict[str, str] = {}
    """Why a node rests, by node."""
    deadline_ms: Milliseconds = Milliseconds(0)
    """Deadline after the round's opening; 0: none is planned."""
    updates_needed: int = 0
    """Quorum of the round as it opens; 0: it is not told."""

    @property
    def parts(self) -> dict[str, NodePart]:
        """Every node's part, also of those that rest."""
        return self.nodes | {node: NodePart(reason=why) for node, why in self.resting.items()}


class RoundPlannedEvent(PublicEvent, frozen=True):
    """A round was planned, and opened by it."""

    plan: JournalledPlan

    @property
    def round(self) -> int:
        """The plan's round."""
        return self.plan.round

    @property
    def reason(self) -> str:
        """The plan's reason."""
        return self.plan.reason


class PhaseTimes(msgspec.Struct, frozen=True):
    """How long each phase of a node's work took."""

    download_ms: int = 0
    train_ms: int = 0
    encode_ms: int = 0
    wait_ms: int = 0
    upload_ms: int = 0


class JournalledUpdate(msgspec.Struct, frozen=True):
    """An accepted update."""

    blob: BlobRef | None = None
    inner_steps: int = 0
    compute_ms: Milliseconds = Milliseconds(0)
    loss_last: float | None = None
    codec: str = ""
    nonce: int = 0
    """The node's wall clock as it submitted the update, Unix time in milliseconds."""
    phases: PhaseTimes | None = None
    """The node's report, with the upload until it was in; None: there is none."""


class UpdateReceivedEvent(PublicEvent, frozen=True):
    """An update was accepted."""

    node: str
    round: int
    update: JournalledUpdate


class UpdateRejectedEvent(PublicEvent, frozen=True):
    """An update was not accepted."""

    node: str
    round: int
    reason: str = ""


class ShardHandedBackEvent(PublicEvent, frozen=True):
    """A participant gave its shard back unfinished."""

    node: str
    round: int
    reason: str = ""


class MemoryFittedEvent(PublicEvent, frozen=True):
    """A participant takes its shard again, with less in memory at once."""

    node: str
    round: int
    reason: str = ""


class DeadlineReachedEvent(PublicEvent, frozen=True):
    """A time limit of a round has passed."""

    round: int = 0


class NodeWeights(msgspec.Struct, frozen=True):
    """Weights that the job's rounds taught, in 1/65,536 of a whole one."""

    weights: dict[str, int] = {}
    honesty: dict[str, int] = {}
    """What samples of their own shards taught of the nodes; none in jobs of older versions."""


class RoundWeights(msgspec.Struct, frozen=True):
    """How much a round's updates counted for its model, see `[trust]` of job files."""

    votes: dict[str, int] = {}
    """Shares of a vote in 1/65,536, of the nodes that had not a full one."""
    reasons: dict[str, str] = {}
    """Why a vote was not full, by node."""
    rollback: str = ""
    """Why the job went back to an earlier model instead; empty: it did not."""
    memory: NodeWeights = NodeWeights()
    """The nodes' weights after the round."""


class AggregateReadyEvent(PublicEvent, frozen=True):
    """A closed round's updates became a model."""

    round: int
    model: JournalledModel | None = None
    omitted: tuple[tuple[str, str], ...] = ()
    """Nodes whose update was damaged on disk, with the reason."""
    weighing: RoundWeights | None = None


class ModelLostEvent(PublicEvent, frozen=True):
    """The newest model's bytes were damaged; it is made again."""

    reason: str = ""


class RoundRecordedEvent(PublicEvent, frozen=True):
    """Figures of a closed round."""

    round: int
    participants: int = 0
    updates: int = 0
    samples: Samples = Samples(0)
    bytes_up: Bytes = Bytes(0)
    bytes_down: Bytes | None = Bytes(0)
    """None: it was not measured, in virtual time."""
    duration_ms: Milliseconds = Milliseconds(0)
    loss: float | None = None
    """Mean of the participants' last training losses; None: it is not told, or no number."""
    samples_per_s: float | None = None
    reason: str = ""
    """Why the round closed."""
    inner_steps: int = 0
    """Median number of the participants' inner steps; 0: it is not told."""
    codecs: Mapping[str, int] = {}
    """How many participants were to send in which codec."""
    forecast_error: float | None = None
    """Error of the forecast finishes relative to the real ones; None: nothing was forecast."""
    updates_needed: int = 0
    """Quorum that the round closed with; 0: it is not told."""


class RoundMeasuredEvent(PublicEvent, frozen=True):
    """The quality of a round's updates is final. Rounds come in ascending order, each once."""

    round: int
    updates: tuple[MeasuredWork, ...]


class EvaluationReadyEvent(PublicEvent, frozen=True):
    """A model was evaluated on held-out samples. A figure is None where it was no number."""

    round: int = 0
    """How many rounds made the model."""
    loss: float | None = None
    metric: float | None = None
    metric_name: str = ""
    metrics: Mapping[str, float | None] = {}
    """Further metrics by name."""
    outputs: tuple[str, ...] = ()
    """The model's output for each of the job's examples."""
    samples: int = 0
    """Held-out samples that were measured; 0: it is not told."""
    samples_all: int = 0

    @property
    def further_metrics(self) -> dict[str, float]:
        """Further metrics that are numbers."""
        return {name: value for name, value in self.metrics.items() if value is not None}


class EvaluationFailedEvent(PublicEvent, frozen=True):
    """The evaluator gave up on a model."""

    round: int = 0
    reason: str = ""


class JobPausedEvent(PublicEvent, frozen=True):
    """A user paused the job, or the coordinator for a reason."""

    reason: str = ""


class JobResumedEvent(PublicEvent, frozen=True):
    """The job goes on."""


class JobStoppedEvent(PublicEvent, frozen=True):
    """A user asked to end the job with the model that it has."""


class ParametersChangedEvent(PublicEvent, frozen=True):
    """A user changed settings."""

    spec: dict[str, Any]
    """The whole description that results, as JSON."""


class CoordinatorChangedEvent(PublicEvent, frozen=True):
    """Another coordinator goes on with the job, or the same one after a while."""

    reason: str = ""


class JobEndedEvent(PublicEvent, frozen=True):
    """The job is over; no round is measured after it."""

    phase: str
    reason: str = ""


class FundingChangedEvent(PublicEvent, frozen=True):
    """Payments stated how much of the job's work its escrow covers."""

    funded_samples: int | None = None
    """Accepted samples since the job's beginning; None: no limit is known."""
    reason: str = ""


PRIVATE_FIELDS: Mapping[str, Mapping[str, object]] = {
    "AggregateReady": {"draw": ""},
    "NodeJoined": {"address": ""},
    "MapCreated": {"draw_seed": "", "request": {}, "spec": None},
    "ServeCreated": {"request": {}, "files": {}, "tuning": None},
    "VersionPublished": {"blob": {}},
    "WindowCounted": {"salt": ""},
    "WindowSigned": {"claim": None},
    "AnswerChecked": {"checker": "", "figures": []},
    "WindowAccepted": {"works": []},
    "BundleReturned": {"result": {}, "claim": None},
    "BundleAccepted": {"blob": {}, "works": []},
    "PartConfirmed": {"works": [], "confirmations": []},
    "BudgetRaised": {"spec": None},
    "ResultsCompared": {"lease": 0, "agreeing": []},
}
"""Fields that the feed hides, by kind, with what it tells instead. By the draw of the next round's
duplicates an owner of nodes would know when their updates are compared; by the digest of a result
a node could answer what it has not done; a request's parameters may be a user's text; by the digest
of an address one could be found out; by the salt of a count a short text could be guessed; by the
name of who checks an answer owners could agree.
"""


def event_kind(event: PublicEvent | type[PublicEvent]) -> str:
    """Return the kind of an event, as the journal calls it."""
    return str(event.__struct_config__.tag)


@cache
def event_types() -> Mapping[str, type[PublicEvent]]:
    """Return the class of each kind that this version knows."""
    of_other_kinds = (*FARM_EVENTS, *SERVING_EVENTS)
    own = [each for each in PublicEvent.__subclasses__() if each not in of_other_kinds]
    return {event_kind(each): each for each in (*own, *of_other_kinds)}


@cache
def _decoder(kind: str) -> msgspec.json.Decoder[PublicEvent] | None:
    event_type = event_types().get(kind)
    return None if event_type is None else msgspec.json.Decoder(event_type)


def decode_event(kind: str, body: bytes) -> PublicEvent | None:
    """Decode the JSON of an event; None where this version does not know its kind.

    Raises:
        ValueError: The body is not one of its kind.
    """
    decoder = _decoder(kind) if kind in event_types() else None
    if decoder is None:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"an event {kind} cannot be read: {error}") from error


def read_event(kind: str, fields: Mapping[str, object]) -> PublicEvent | None:
    """Return an event for people; None where this version cannot read it, or has no such kind."""
    event_type = event_types().get(kind)
    if event_type is None:
        return None
    try:
        return msgspec.convert(fields, event_type)
    except msgspec.ValidationError:
        return None


def public_body(kind: str, body: bytes) -> bytes:
    """Return a journal row's body as the feed tells it."""
    if kind not in PRIVATE_FIELDS:
        return body
    return msgspec.json.encode(msgspec.json.decode(body) | PRIVATE_FIELDS[kind])
