"""What one turn of the pump finds, and how long nothing can have changed after it."""

from collections import Counter
from typing import NamedTuple

from coordinator.core.settlement.epoch import Move
from coordinator.core.settlement.sending import Deed, Found, Ruling, Sighting, TransactionState
from coordinator.shell.chain.sending import unix_ms
from coordinator.shell.journal.ledger.records import OutboxRow, Progress
from hypergpu.chain.rpc.answers import Block, Event
from hypergpu.units import Milliseconds


class Turn(NamedTuple):
    """What one turn of the pump found and did."""

    head: Block
    waiting: int
    """Transactions in no block, after it."""
    mined: int
    """In a block, not yet final, after it."""
    moved: "Counter[str]"
    complaints: tuple[str, ...]
    """What keeps a transaction from being taken; for people."""
    events: tuple[Event, ...]
    """What contracts said in the transactions that were found in blocks."""
    is_behind: bool = False
    """Whether something that is stored is in a block above the newest one given: what contracts say
    in that is of before."""


class Resting(NamedTuple):
    """Every transaction is either on its way or in a block that is still there.

    Until the chain has another block, or the outbox another transaction, only time changes what is
    to be done about them. To look at thousands again meanwhile would take most of a core.
    """

    outcome: Turn
    next_nonce: int
    """Of the outbox."""
    until_ms: Milliseconds

    def again(self) -> Turn:
        """What a turn finds while nothing has changed."""
        return self.outcome._replace(moved=Counter(), events=())


class Collected:
    """What is collected during a turn, to be written at once."""

    is_mending = False
    """Whether nonces behind a failed transaction are spent on nothing, rather than waited for."""

    def __init__(self, head: Block) -> None:
        self.head = head
        self.blocks: dict[int, Block] = {head.number: head}
        """As they were when the turn first asked for them."""
        self.progress: list[Progress] = []
        self.moves: list[tuple[OutboxRow, Move]] = []
        self.states: dict[int, TransactionState] = {}
        """What the transactions became that moved, by nonce."""
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.events: list[Event] = []
        self.halt = ""
        self.halt_fix = ""
        """Closer than the reason's own."""
        self.is_clear = True
        """Whether nothing is to be asked or sent again before something changes."""
        self.is_held = False
        """Whether a nonce is used and its transaction is not found: it may be somebody else's, and
        nothing goes out that builds on ours."""
        self.is_behind = False

    def canonical_hash(self, number: int) -> bytes | None:
        """Of the block that is now at a height; None: not known."""
        block = self.blocks.get(number)
        return None if block is None else block.hash

    def leave_ahead(self, row: OutboxRow, place: Found | None) -> bool:
        """Whether a transaction lies above the newest block, and is left for the next turn."""
        if place is None or place.block.number <= self.head.number:
            return False
        self.is_clear = False
        is_success = place.is_success and row.state is not TransactionState.FAILED
        self.is_held = self.is_held or not is_success
        # Stored as it was seen under a newer block, or in one that is gone.
        self.is_behind = self.is_behind or row.block is not None
        return True

    def look_behind(self, finals: tuple[OutboxRow, ...]) -> None:
        """Note whether something final is in a block that is there, above the newest one."""
        for block in (row.block for row in finals if row.block):
            is_there = self.canonical_hash(block.number) == block.hash
            if is_there and block.number > self.head.number:
                self.is_behind, self.is_clear = True, False

    def first_to_mend(self, rows: tuple[OutboxRow, ...]) -> int | None:
        """The nonce from which on nothing is sent as it was signed; None: all is."""
        failed = [row.transaction.nonce for row in rows if row.state is TransactionState.FAILED]
        return min(failed) if failed and self.is_mending else None

    def judge(self, nonce: int, seen: Sighting, verdict: Ruling) -> None:
        """Note whether a transaction is where only a block or time can change anything."""
        if seen.found is None:
            is_vanished = nonce < seen.next_nonce
            self.is_held = self.is_held or is_vanished
            is_clear = not is_vanished and verdict.deed is not Deed.NOTE_MISSING
        else:
            is_clear = seen.found.is_success and seen.found.block.hash == seen.canonical_hash
        self.is_clear = self.is_clear and is_clear

    def outcome(self, rows: tuple[OutboxRow, ...]) -> Turn:
        """The turn, once all of it is written and sent."""
        states = Counter(self.states.get(row.transaction.nonce, row.state) for row in rows)
        return Turn(
            head=self.head,
            waiting=states[TransactionState.WAITING],
            mined=states[TransactionState.MINED],
            moved=self.counts,
            complaints=tuple(self.complaints),
            events=tuple(self.events),
            is_behind=self.is_behind,
        )


class Mending(Collected):
    """The same, of a turn that stops at no failed transaction."""

    is_mending = True


def last_words(row: OutboxRow, reason: str) -> str:
    """Why sending stops at a transaction."""
    transaction = row.transaction
    names = ", ".join("0x" + each.attempt.hash.hex() for each in row.attempts)
    return (
        f"transaction {transaction.nonce} of {transaction.account.address} "
        f"({transaction.purpose}, {names}): {reason}. Nothing is sent behind it"
    )


def progressed(row: OutboxRow, state: TransactionState, place: Found | None) -> Progress:
    """What is stored of a transaction that is in a state now, and where."""
    mined_ms = row.mined_ms
    block, mined_hash = (place.block, place.hash) if place else (None, None)
    if block is None:
        mined_ms = None
    elif mined_ms is None:
        mined_ms = unix_ms()
    is_sent = row.is_sent or block is not None
    return Progress(row.transaction.nonce, state, is_sent, block, mined_ms, mined_hash)
