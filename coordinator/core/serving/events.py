"""What happens to a served model. Calls and answers are in no event: they are nobody's to keep."""

from collections.abc import Mapping

from coordinator.core.work.funding import Funding
from coordinator.core.work.work_events import (
    CoordinatorChanged,
    FundingChanged,
    JobEnded,
    JobPaused,
    JobResumed,
    JobStopped,
    MembershipEvent,
    StampedEvent,
)
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId, TokenId
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.serving_events import ServePay
from hypergpu.ledger_terms import Terms
from hypergpu.rings.layer_span import LayerSpan, PlacedStage, RingShare
from hypergpu.serving.calls import CheckFigures
from hypergpu.serving.check_messages import StageFigures
from hypergpu.serving.serve_request import ServeRequest
from hypergpu.serving.tuned_model import Tuning
from hypergpu.statements import SignedContribution
from hypergpu.token_counts import TokenCount
from hypergpu.work_units import WorkUnit


class ServeCreated(StampedEvent, frozen=True, tag=True):
    """A user asked for the model to be served."""

    job_id: JobId
    owner: TokenId
    request: ServeRequest
    model: str
    """As of the request, for readers who do not see the request."""
    terms: Terms = Terms()
    pay: ServePay | None = None
    """None: an earlier version created it, and its answers have no receipts."""
    funding: Funding | None = None
    files: Mapping[str, BlobRef] = {}
    """Files of the base of a training, as its data have them."""
    tuning: Tuning | None = None
    """What makes the model of that base; None: the request's files are the model."""
    training: str = ""
    """The training, for readers who do not see the rest; empty: there is none."""
    rounds: int = 0
    """Its rounds after which the model is."""


class VersionPublished(StampedEvent, frozen=True, tag=True):
    """The training that the model follows has a newer model."""

    rounds: int
    """After so many rounds."""
    blob: BlobRef


class ModelUnloaded(StampedEvent, frozen=True, tag=True):
    """Nobody called for so long that nodes let go of the model."""

    reason: str


class ModelWanted(StampedEvent, frozen=True, tag=True):
    """A call came for a model that no node holds, as nobody had called for a while."""


class ReplicaHandedBack(StampedEvent, frozen=True, tag=True):
    """A node does not hold the model, or no longer."""

    node: NodeId
    lease: int
    reason: str
    is_lasting: bool = False
    """Whether the same node would fail again: its memory, or a limit of its owner."""


class RingPlaced(StampedEvent, frozen=True, tag=True):
    """Nodes were chosen for layers of a model that is cut."""

    stages: tuple[PlacedStage, ...]
    reason: str
    is_whole: bool = False
    """Whether every layer is placed anew; else only those that no node holds."""
    ring: int = 0
    """The ring that they are of, where a training has several; from 0 on."""


class RingUnplaced(StampedEvent, frozen=True, tag=True):
    """The nodes that are there cannot hold the layers that no node holds."""

    reason: str
    ring: int = 0
    """As of `RingPlaced`."""


class StandbyPlaced(StampedEvent, frozen=True, tag=True):
    """A node is to stand by for a ring."""

    node: NodeId
    span: LayerSpan
    """The stage that it holds ready."""
    reason: str
    files_of: tuple[LayerSpan, ...] = ()
    """Other stages whose files it has."""


class StageMoved(StampedEvent, frozen=True, tag=True):
    """A node has lost what it held of a ring, and the one that stood by takes its layers."""

    node: NodeId
    lease: int
    to: NodeId
    reason: str


class RingRoundStored(StampedEvent, frozen=True, tag=True):
    """A round of a training through a ring is over, and the adapter of every layer is stored."""

    rounds: int
    """Rounds so far."""
    step: int
    """Optimizer steps so far."""
    loss: float
    """Mean of the round's tokens that count."""
    tokens: int
    """Tokens of the round."""
    adapter: Mapping[str, BlobRef]
    """Adapters of the layers with their optimizer's state, by the names of the layers' files."""
    figures: str = ""
    """What the ring was forecast to do, for people."""
    held_out_loss: float | None = None
    """Mean of the tokens of rows that are held out, after the round; None: none are."""
    shares: tuple[RingShare, ...] = ()
    """Rings, where there are several, whose adapters were folded; empty: the training has one."""
    ring_adapters: Mapping[int, Mapping[str, BlobRef]] = {}
    """By ring, where there are several, ``adapter`` with the ring's own optimizer state; a ring
    that is not among them goes on from ``adapter``.
    """
    momentum: Mapping[str, BlobRef] = {}
    """Outer momentum of several rings by the names of the layers' files; empty: it is zero."""
    outer: str = ""
    """Why several rings were folded so, for people."""
    left_out: str = ""
    """Rings that the round did not wait for, and why, for people; empty: none was."""


class WindowCounted(StampedEvent, frozen=True, tag=True):
    """The tokens that a replica gave since its last count: whoever loses this has lost only them.

    It has no number: the machine gives it one.
    """

    node: NodeId
    lease: int
    count: TokenCount
    answers: Digest
    """End of the chain of digests of what was counted."""
    salt: str
    """Beginning of the chain, as hexadecimal digits."""
    checked_answers: int = 0
    """Answers that other nodes scored again."""
    fault: str = ""
    """Why it is not paid; empty: nothing was found wrong."""


class WindowSigned(StampedEvent, frozen=True, tag=True):
    """A node signed a count."""

    node: NodeId
    window: int
    claim: SignedContribution | None = None
    """The node's statement; None: it sent none, or not under the job's terms."""


class WindowAccepted(StampedEvent, frozen=True, tag=True):
    """A count is signed and counts: a record, which the machine never reads."""

    node: NodeId
    window: int
    units: int
    works: tuple[MeasuredWork, ...]
    """The count with its node's signature: it becomes a receipt."""
    unit: str = WorkUnit.TOKENS.value


class WindowRefused(StampedEvent, frozen=True, tag=True):
    """Tokens are not paid: a record, which the machine never reads."""

    node: NodeId
    units: int
    reason: str
    unit: str = WorkUnit.TOKENS.value


class AnswerChecked(StampedEvent, frozen=True, tag=True):
    """A node scored an answer of another one again. Neither text nor token is in it."""

    node: NodeId
    """Who gave the answer."""
    checker: NodeId
    answer: int
    """Its number, which means nothing to another process."""
    figures: CheckFigures


class CheckUndecided(StampedEvent, frozen=True, tag=True):
    """No third node is there to score an answer that one found wrong."""

    node: NodeId
    answer: int


class AnswerDoubted(StampedEvent, frozen=True, tag=True):
    """An answer is taken to be wrong: a record, which the machine never reads."""

    node: NodeId
    reason: str


class StageChecked(StampedEvent, frozen=True, tag=True):
    """A node computed again what a stage of a ring was given of a conversation."""

    node: NodeId
    """Who holds the stage."""
    lease: int
    checker: NodeId
    check: int
    """Its number, which means nothing to another process."""
    figures: StageFigures


class StagesContradicted(StampedEvent, frozen=True, tag=True):
    """Two nodes of a ring say different things of what one gave the other."""

    node: NodeId
    """Who is blamed: the one that sent."""
    lease: int
    other: NodeId
    other_lease: int
    reason: str
    is_stuck: bool = False
    """Whether the ring cannot go on with both."""
    check: int = 0
    """Number of the check that told it; 0: a pass did."""


class CountsClosed(StampedEvent, frozen=True, tag=True):
    """The model was stopped and no further count comes: all that is left is to be signed."""


class SettlementDue(StampedEvent, frozen=True, tag=True):
    """The time is over in which nodes could sign counts of a model that was stopped."""


ServeEvent = (
    ServeCreated
    | VersionPublished
    | ModelUnloaded
    | ModelWanted
    | ReplicaHandedBack
    | RingPlaced
    | RingUnplaced
    | StandbyPlaced
    | StageMoved
    | RingRoundStored
    | WindowCounted
    | WindowSigned
    | WindowAccepted
    | WindowRefused
    | AnswerChecked
    | CheckUndecided
    | AnswerDoubted
    | StageChecked
    | StagesContradicted
    | CountsClosed
    | SettlementDue
    | MembershipEvent
    | JobPaused
    | JobResumed
    | JobStopped
    | FundingChanged
    | CoordinatorChanged
    | JobEnded
)
