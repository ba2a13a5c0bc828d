"""Public events of served models. Calls and answers are in none: they are nobody's to keep."""

import msgspec

from hypergpu.ids import Digest, JobId
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.public_event import PublicEvent
from hypergpu.ledger_terms import Terms
from hypergpu.rings.layer_span import LayerSpan, PlacedStage, RingShare
from hypergpu.token_counts import TokenCount
from hypergpu.units import Wei


class ServePay(msgspec.Struct, frozen=True, kw_only=True):
    """Pay for answers of a served model, in the smallest units of the ledger's token."""

    unit_price: Wei
    """Price of 100 units; 0: receipts are counted and no money is due."""
    budget: Wei
    """Amount set aside for the job, and the most that it may cost."""
    windows_per_epoch: int
    """Accepted windows whose receipts are settled together."""
    request: Digest
    """Digest of what the user asked for."""


class ServeCreatedEvent(PublicEvent, frozen=True):
    """A user asked for a model to be served."""

    job_id: JobId
    model: str
    """Name that calls ask for."""
    terms: Terms = Terms()
    pay: ServePay | None = None
    """None: an earlier version created it, and its answers have no receipts."""
    training: str = ""
    """The training whose model it is; empty: it is no training's."""
    rounds: int = 0
    """Rounds of the training after which the model is."""


class VersionPublishedEvent(PublicEvent, frozen=True):
    """The training that the model follows has a newer model, which its nodes take up."""

    rounds: int
    """After so many rounds."""


class ModelUnloadedEvent(PublicEvent, frozen=True):
    """Nobody called for so long that nodes let go of the model."""

    reason: str = ""


class ModelWantedEvent(PublicEvent, frozen=True):
    """A call came, and nodes load the model again."""


class ReplicaHandedBackEvent(PublicEvent, frozen=True):
    """A node does not hold the model, or no longer."""

    node: str
    reason: str = ""


class RingPlacedEvent(PublicEvent, frozen=True):
    """Nodes were chosen for layers of a model that is cut."""

    stages: tuple[PlacedStage, ...]
    reason: str
    is_whole: bool = False
    """Whether every layer is placed anew."""
    ring: int = 0
    """The ring that they are of, where a training has several; from 0 on."""


class RingUnplacedEvent(PublicEvent, frozen=True):
    """The nodes that are there cannot hold the layers that no node holds."""

    reason: str


class StandbyPlacedEvent(PublicEvent, frozen=True):
    """A node is to hold a stage ready for one that is lost."""

    node: str
    span: LayerSpan
    """The stage that it holds ready."""
    reason: str


class StageMovedEvent(PublicEvent, frozen=True):
    """A node has lost its layers, and the one that stood by takes them."""

    node: str
    to: str
    reason: str


class RingRoundStoredEvent(PublicEvent, frozen=True):
    """A round of a training through a ring is over, and its adapter is stored."""

    rounds: int
    """Rounds so far."""
    step: int = 0
    """Optimizer steps so far."""
    loss: float = 0.0
    """Mean of the round's tokens that count."""
    tokens: int = 0
    """Tokens of the round."""
    figures: str = ""
    """What the ring was forecast to do."""
    held_out_loss: float | None = None
    """Mean of the tokens of rows that are held out, after the round; null: none are."""
    shares: tuple[RingShare, ...] = ()
    """Rings, where there are several, whose adapters were folded; empty: the training has one."""
    outer: str = ""
    """Why several rings were folded so."""
    left_out: str = ""
    """Rings that the round did not wait for, and why; empty: none was."""


class WindowCountedEvent(PublicEvent, frozen=True):
    """The tokens that a replica gave since its last count, which its node has not signed yet."""

    node: str
    count: TokenCount = TokenCount()


class WindowSignedEvent(PublicEvent, frozen=True):
    """A node signed a count of its tokens."""

    node: str
    window: int


class WindowAcceptedEvent(PublicEvent, frozen=True):
    """A count of tokens is signed and counts: its node gets a receipt."""

    node: str
    window: int
    units: int
    works: tuple[MeasuredWork, ...] = ()
    """The count with its node's signature."""
    unit: str = "tokens"
    """What was counted, ``tokens`` or ``layer-tokens``."""


class WindowRefusedEvent(PublicEvent, frozen=True):
    """Tokens of a node are not paid."""

    node: str
    units: int
    reason: str = ""
    unit: str = "tokens"
    """What was counted, ``tokens`` or ``layer-tokens``."""


class AnswerCheckedEvent(PublicEvent, frozen=True):
    """A node scored an answer of another one again."""

    node: str
    """Who gave the answer."""


class CheckUndecidedEvent(PublicEvent, frozen=True):
    """No third node is there to score an answer that one found wrong."""

    node: str


class AnswerDoubtedEvent(PublicEvent, frozen=True):
    """An answer is taken to be wrong, and not paid."""

    node: str
    reason: str = ""


class StageCheckedEvent(PublicEvent, frozen=True):
    """A node computed again what a stage of a ring was given of a conversation."""

    node: str
    """Who holds the stage."""
    checker: str = ""


class StagesContradictedEvent(PublicEvent, frozen=True):
    """Two nodes of a ring say different things of what one gave the other."""

    node: str
    """Who is blamed: the one that sent."""
    other: str = ""
    reason: str = ""


class CountsClosedEvent(PublicEvent, frozen=True):
    """The model was stopped and no further count comes."""


class SettlementDueEvent(PublicEvent, frozen=True):
    """The time is over in which nodes could sign the counts of a model that was stopped."""


SERVING_EVENTS: tuple[type[PublicEvent], ...] = (
    ServeCreatedEvent,
    VersionPublishedEvent,
    ModelUnloadedEvent,
    ModelWantedEvent,
    ReplicaHandedBackEvent,
    RingPlacedEvent,
    RingUnplacedEvent,
    StandbyPlacedEvent,
    StageMovedEvent,
    RingRoundStoredEvent,
    WindowCountedEvent,
    WindowSignedEvent,
    WindowAcceptedEvent,
    WindowRefusedEvent,
    AnswerCheckedEvent,
    CheckUndecidedEvent,
    AnswerDoubtedEvent,
    StageCheckedEvent,
    StagesContradictedEvent,
    CountsClosedEvent,
    SettlementDueEvent,
)
"""All of them."""
