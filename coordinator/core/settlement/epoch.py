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

Once the payments are mined the chain is asked whom they passed over: nodes without stake wait for
the challenge window, and one more payment is due when it is over. Where a chain's profile says so,
what rounding left of the pool is then returned to the job's escrow. Before the epoch is final the
chain is asked once more, of a block that stays: an answer may have been of another than was asked.

Anybody may close an epoch that has long been open on the ledger. What it has recorded by then is
paid as ever; it takes no more, and its later receipts are settled with the next epoch.
"""

from enum import Enum
from typing import NamedTuple

import msgspec

from hypergpu.ids import JobId, NodeId
from hypergpu.units import several


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
    SWEEP = "sweep"
    """Returns the dust."""


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
    nodes: tuple[NodeId, ...] = ()
    """Whose receipts they are, ascending."""
    is_ended: bool = False
    """No more receipts will come, and all that came are sealed."""
    batch: Tally = Tally()
    close: Tally = Tally()
    payment: Tally = Tally()
    sweep: Tally = Tally()
    counted: int = 0
    """Payments that were mined when the chain was last asked whom they passed over."""
    checked: int = 0
    """Payments that were final when a block that stays was asked, and nobody was passed over."""
    deferred: int = 0
    """Nodes that they passed over."""
    window_ends_s: int = 0
    """By the chain's clock; 0: not known."""
    is_whole: bool = False
    """Whether the nodes' scores are all of the epoch's: only then can the dust be told."""
    short: int = 0
    """What its pool was less than its receipts were worth, when the chain was last asked."""
    is_closed_by_others: bool = False
    """On the ledger, before a close of its coordinator got there."""
    is_swept_by_others: bool = False
    """So is its dust."""

    def tally(self, part: Part) -> Tally:
        """The transactions of one part."""
        tallies = {
            Part.BATCH: self.batch,
            Part.CLOSE: self.close,
            Part.PAYMENT: self.payment,
            Part.SWEEP: self.sweep,
        }
        return tallies[part]

    @property
    def is_closing(self) -> bool:
        """Whether a close is signed, or none is needed any more."""
        return self.is_closed_by_others or bool(self.close.sealed)

    @property
    def is_count_due(self) -> bool:
        """Whether the chain is to be asked whom the payments passed over."""
        payment = self.payment
        return 0 < payment.sealed == payment.mined and self.counted < payment.sealed

    @property
    def is_check_due(self) -> bool:
        """Whether a block that stays is to be asked whether everybody is paid."""
        is_counted = self.receipts and self.payment.sealed == self.counted and not self.deferred
        return bool(is_counted) and self._is_all_final and self.checked < self.payment.sealed

    @property
    def _is_all_final(self) -> bool:
        return all(each.final == each.sealed for each in self._tallies)

    @property
    def _tallies(self) -> tuple[Tally, ...]:
        return self.batch, self.close, self.payment, self.sweep

    @property
    def state(self) -> EpochState:
        """How far it is."""
        if self.is_ended and not self.receipts:
            return EpochState.FINAL
        if not self.is_ended or not self.is_closing or not self.payment.sealed:
            return EpochState.OPEN
        if any(each.sent < each.sealed for each in self._tallies):
            return EpochState.SEALED
        if any(each.mined < each.sealed for each in (self.batch, self.close)):
            return EpochState.PUBLISHED
        if self.deferred or self.counted < self.payment.sealed:
            return EpochState.CONFIRMED
        if not self._is_all_final or self.checked < self.payment.sealed:
            return EpochState.PAID
        return EpochState.FINAL


class EpochEvent(msgspec.Struct, frozen=True):
    """What happened to an epoch."""


class PartSealed(EpochEvent, frozen=True):
    """A transaction was signed and stored."""

    part: Part
    receipts: int = 0
    """That it records."""
    nodes: tuple[NodeId, ...] = ()
    """Whose."""


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
    """The chain was asked whom the payments passed over."""

    deferred: int
    window_ends_s: int
    is_whole: bool
    short: int = 0
    """What the pool is less than the score is worth."""
    is_deep: bool = False
    """Of a block that stays, with all of the epoch's transactions in it or below."""


def refusal(epoch: Epoch, event: EpochEvent) -> str:
    """Why the epoch does not accept the event; empty when it does."""
    match event:
        case PartSealed(part=part):
            return _sealing_refusal(epoch, part)
        case EpochEnded():
            return f"{_name(epoch)} has ended already" if epoch.is_ended else ""
        case PartMoved():
            return _move_refusal(epoch, event)
        case PaymentsCounted():
            is_expected = epoch.is_count_due or epoch.deferred or epoch.is_check_due
            return "" if is_expected else f"{_name(epoch)} has no payments to count"
        case _:
            return ""


def transition(epoch: Epoch, event: EpochEvent) -> Epoch:
    """Advance the epoch by one event; an event that `refusal` names changes nothing."""
    if refusal(epoch, event):
        return epoch
    match event:
        case PartSealed(part=part):
            epoch = msgspec.structs.replace(
                epoch,
                receipts=epoch.receipts + event.receipts,
                nodes=tuple(sorted({*epoch.nodes, *event.nodes})),
            )
            return _counted(epoch, part, Tally(sealed=1))
        case EpochEnded():
            return msgspec.structs.replace(epoch, is_ended=True)
        case PartMoved(part=part, move=move):
            return _counted(epoch, part, _COUNTS[move])
        case PaymentsCounted():
            is_checked = event.is_deep and not event.deferred
            return msgspec.structs.replace(
                epoch,
                counted=epoch.payment.mined,
                checked=epoch.payment.final if is_checked else epoch.checked,
                deferred=event.deferred,
                window_ends_s=event.window_ends_s,
                is_whole=event.is_whole,
                short=event.short,
            )
        case _:
            return epoch


class Due(NamedTuple):
    """The transaction that an epoch needs next, and why."""

    part: Part
    reason: str


def due(epoch: Epoch, chain_time_s: int, *, sweeps: int) -> Due | None:
    """What is to be sealed next for an epoch; None while there is nothing to do but wait.

    Args:
        epoch: Which.
        chain_time_s: Of the newest block: windows are the contract's, by its clock.
        sweeps: Dust is returned for epochs of at most so many nodes; 0: never.
    """
    if not epoch.is_ended or not epoch.receipts:
        return None
    if not epoch.is_closing:
        recorded = f"with {several(epoch.receipts, 'receipt')} recorded"
        return Due(Part.CLOSE, f"{_name(epoch)} has ended {recorded}")
    if not epoch.payment.sealed:
        return Due(Part.PAYMENT, f"{_name(epoch)} is closed")
    if epoch.counted < epoch.payment.sealed:
        return None
    if epoch.deferred and chain_time_s >= epoch.window_ends_s:
        waiting = several(epoch.deferred, "node")
        return Due(Part.PAYMENT, f"the window of {_name(epoch)} is over for {waiting}")
    is_swept = epoch.is_swept_by_others or epoch.sweep.sealed
    is_sweepable = epoch.is_whole and not is_swept and not epoch.deferred
    if is_sweepable and len(epoch.nodes) <= sweeps:
        return Due(Part.SWEEP, f"every node of {_name(epoch)} is paid")
    return None


def _sealing_refusal(epoch: Epoch, part: Part) -> str:
    if part is Part.BATCH:
        return f"{_name(epoch)} has ended and takes no more receipts" if epoch.is_ended else ""
    if not epoch.is_ended:
        return f"{_name(epoch)} has not ended"
    if part is Part.CLOSE:
        return f"{_name(epoch)} is closed once" if epoch.is_closing else ""
    if part is Part.SWEEP and (epoch.sweep.sealed or epoch.is_swept_by_others):
        return f"{_name(epoch)} is swept once"
    return "" if epoch.is_closing else f"{_name(epoch)} is paid after its close"


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
    epoch = msgspec.structs.replace(epoch, **{part.value: counted})
    # A payment that is gone has paid nobody: the chain is asked again once it is back.
    return msgspec.structs.replace(
        epoch,
        counted=min(epoch.counted, epoch.payment.mined),
        checked=min(epoch.checked, epoch.payment.final),
    )


def _name(epoch: Epoch) -> str:
    return f"epoch {epoch.number} of {epoch.job_id}"
