"""One epoch of a job on its way to the chain.

Theory of operation. Receipts of an epoch are sealed into batches while it is still open. When the
job says that it has ended and the last receipt is in a batch, its close is sealed (which reserves
the pool), and its payments behind it; nothing waits for a block in between, since the account's
nonces keep the order. From then on the epoch only counts: what is mined, what is final. Its state
follows from the counts and is not stored, so that a reorganisation, which takes counts back, cannot
leave a state that contradicts them::

    OPEN ─▶ SEALED ─▶ PUBLISHED ─▶ CONFIRMED ─▶ PAID ─▶ FINAL
             all are   sent once    recorded     every    nothing can
             signed                 and closed   node     undo it

Nodes without stake wait for the challenge window: the first payment passes over them, `deferred`
counts them, and one more payment is due once the window is over.
"""

from enum import Enum
from typing import NamedTuple

import msgspec

from hypergpu.ids import JobId


class EpochState(Enum):
    """How far an epoch is. The order is that of the definition."""

    OPEN = "open"
    SEALED = "sealed"
    PUBLISHED = "published"
    CONFIRMED = "confirmed"
    PAID = "paid"
    FINAL = "final"


class Part(Enum):
    """What a transaction does for an epoch."""

    BATCH = "batch"
    """Records receipts."""
    CLOSE = "close"
    """Reserves the pool and freezes the scores."""
    PAYMENT = "payment"
    """Pays nodes."""


class Tally(msgspec.Struct, frozen=True):
    """Transactions of one part. ``final <= mined <= sent <= sealed``."""

    sealed: int = 0
    sent: int = 0
    mined: int = 0
    final: int = 0


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch of one job."""

    job_id: JobId
    number: int
    receipts: int = 0
    """Sealed into batches."""
    is_ended: bool = False
    """No more receipts will come, and all that came are sealed."""
    batch: Tally = Tally()
    close: Tally = Tally()
    payment: Tally = Tally()
    deferred: int = 0
    """Nodes that the last payment passed over."""
    window_ends_s: int = 0
    """By the chain's clock; 0: not known."""

    def tally(self, part: Part) -> Tally:
        """The transactions of one part."""
        return {Part.BATCH: self.batch, Part.CLOSE: self.close, Part.PAYMENT: self.payment}[part]

    @property
    def state(self) -> EpochState:
        """How far it is."""
        parts = (self.batch, self.close, self.payment)
        recorded = (self.batch, self.close)
        if not self.is_ended or not self.close.sealed or not self.payment.sealed:
            return EpochState.OPEN
        if any(each.sent < each.sealed for each in parts):
            return EpochState.SEALED
        if any(each.mined < each.sealed for each in recorded):
            return EpochState.PUBLISHED
        if self.deferred or self.payment.mined < self.payment.sealed:
            return EpochState.CONFIRMED
        if any(each.final < each.sealed for each in parts):
            return EpochState.PAID
        return EpochState.FINAL


class EpochEvent(msgspec.Struct, frozen=True):
    """What happened to an epoch."""


class PartSealed(EpochEvent, frozen=True):
    """A transaction was signed and stored."""

    part: Part
    receipts: int = 0
    """That it records."""


class EpochEnded(EpochEvent, frozen=True):
    """The job has left the epoch, and its last receipt is sealed."""


class Move(Enum):
    """What became of a transaction."""

    SENT = "sent"
    """For the first time."""
    MINED = "mined"
    """It is in a block and took effect."""
    MISSING = "missing"
    """Its block was reorganised away."""
    FINISHED = "finished"
    """Its block is deep enough."""
    UNDONE = "undone"
    """A reorganisation reached deeper than what counts as final."""


class PartMoved(EpochEvent, frozen=True):
    """Something became of a transaction."""

    part: Part
    move: Move


class PaymentsCounted(EpochEvent, frozen=True):
    """The chain was asked whom a payment passed over."""

    deferred: int
    window_ends_s: int


def refusal(epoch: Epoch, event: EpochEvent) -> str:
    """Why the epoch does not accept the event; empty when it does."""
    match event:
        case PartSealed(part=part):
            return _sealing_refusal(epoch, part)
        case EpochEnded():
            return f"{_name(epoch)} has ended already" if epoch.is_ended else ""
        case PartMoved():
            return _move_refusal(epoch, event)
        case PaymentsCounted(deferred=deferred) if deferred < 0:
            return f"{_name(epoch)}: {deferred} nodes cannot wait"
        case _:
            return ""


def transition(epoch: Epoch, event: EpochEvent) -> Epoch:
    """Advance the epoch by one event; an event that `refusal` names changes nothing."""
    if refusal(epoch, event):
        return epoch
    match event:
        case PartSealed(part=part, receipts=receipts):
            epoch = msgspec.structs.replace(epoch, receipts=epoch.receipts + receipts)
            return _counted(epoch, part, Tally(sealed=1))
        case EpochEnded():
            return msgspec.structs.replace(epoch, is_ended=True)
        case PartMoved(part=part, move=move):
            return _counted(epoch, part, _COUNTS[move])
        case PaymentsCounted(deferred=deferred, window_ends_s=ends_s):
            return msgspec.structs.replace(epoch, deferred=deferred, window_ends_s=ends_s)
        case _:
            return epoch


class Due(NamedTuple):
    """The transaction that an epoch needs next, and why."""

    part: Part
    reason: str


def due(epoch: Epoch, chain_time_s: int) -> Due | None:
    """What is to be sealed next for an epoch; None while there is nothing to do but wait.

    Args:
        epoch: Which.
        chain_time_s: Of the newest block: windows are the contract's, by its clock.
    """
    if not epoch.is_ended:
        return None
    if not epoch.close.sealed:
        return Due(Part.CLOSE, f"{_name(epoch)} has ended and its {epoch.receipts} receipts are in")
    if not epoch.payment.sealed:
        return Due(Part.PAYMENT, f"{_name(epoch)} is closed in the same breath")
    is_settled = epoch.payment.mined == epoch.payment.sealed
    if epoch.deferred and is_settled and chain_time_s > epoch.window_ends_s > 0:
        return Due(Part.PAYMENT, f"the window of {_name(epoch)} is over for {epoch.deferred} nodes")
    return None


def _sealing_refusal(epoch: Epoch, part: Part) -> str:
    if part is Part.BATCH:
        return f"{_name(epoch)} has ended and takes no more receipts" if epoch.is_ended else ""
    if not epoch.is_ended:
        return f"{_name(epoch)} has not ended"
    if part is Part.CLOSE:
        return f"{_name(epoch)} is closed once" if epoch.close.sealed else ""
    return "" if epoch.close.sealed else f"{_name(epoch)} is paid after its close"


_COUNTS = {
    Move.SENT: Tally(sent=1),
    Move.MINED: Tally(mined=1),
    Move.MISSING: Tally(mined=-1),
    Move.FINISHED: Tally(final=1),
    Move.UNDONE: Tally(mined=-1, final=-1),
}


def _move_refusal(epoch: Epoch, event: PartMoved) -> str:
    tally = epoch.tally(event.part)
    is_possible = {
        Move.SENT: tally.sent < tally.sealed,
        Move.MINED: tally.mined < tally.sent,
        Move.MISSING: tally.mined > tally.final,
        Move.FINISHED: tally.final < tally.mined,
        Move.UNDONE: tally.final > 0,
    }[event.move]
    if is_possible:
        return ""
    return f"{_name(epoch)} has {tally} of {event.part.value}: none can be {event.move.value}"


def _counted(epoch: Epoch, part: Part, change: Tally) -> Epoch:
    tally = epoch.tally(part)
    counted = Tally(
        sealed=tally.sealed + change.sealed,
        sent=tally.sent + change.sent,
        mined=tally.mined + change.mined,
        final=tally.final + change.final,
    )
    return msgspec.structs.replace(epoch, **{part.value: counted})


def _name(epoch: Epoch) -> str:
    return f"epoch {epoch.number} of {epoch.job_id}"
