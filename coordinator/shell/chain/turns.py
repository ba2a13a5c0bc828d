"""What one turn of the pump finds, and how long nothing can have changed after it."""

from collections import Counter
from typing import NamedTuple

from coordinator.core.settlement.epoch import Move
from coordinator.core.settlement.sending import Deed, Found, Ruling, Sighting, TransactionState
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
