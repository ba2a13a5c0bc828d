"""A chain with blocks, reorganisations, a pool that forgets, and strangers, for one account."""

from dataclasses import dataclass, field

from msgspec.structs import replace as with_fields

from hypergpu.ids import JobId
from payments.core.outbox import (
    Action,
    Failure,
    FindFailure,
    Halt,
    Inclusion,
    MarkFinal,
    MarkMined,
    MarkUnmined,
    OutboxRow,
    OutboxRules,
    OutboxView,
    RaiseFee,
    SendAgain,
    Variant,
    abandoned_by_retry,
    decide,
    halted_jobs,
    halting_rows,
    next_nonce,
)

DEPTH = 4
RULES = OutboxRules(depth=DEPTH, bump_blocks=3)
STRANGER = b"somebody else's"


@dataclass(frozen=True)
class Mined:
    """One transaction of the account in a block; ``purpose`` is empty for a stranger's."""

    hash: bytes
    purpose: str
    is_success: bool


@dataclass(frozen=True)
class Block:
    """A block with the account's transactions."""

    hash: bytes
    transactions: tuple[Mined, ...] = ()


@dataclass
class ChainWorld:
    """The chain, the pool, and the coordinator's queue on top of them."""

    blocks: list[Block] = field(default_factory=lambda: [Block(b"genesis")])
    pool: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """Nonce and purpose of each variant that the pool holds."""
    planned: list[tuple[str, JobId]] = field(default_factory=list)
    rows: list[OutboxRow] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Purposes whose rows were marked final with their effect."""
    broken: set[str] = field(default_factory=set)
    """Purposes that the contract refuses."""
    halts: dict[JobId | None, Halt] = field(default_factory=dict)
    balance_wei: int = 10**18
    _made: int = 0

    @property
    def transactions(self) -> list[Mined]:
        """The account's transactions in nonce order."""
        return [each for block in self.blocks for each in block.transactions]

    def purposes(self) -> set[str]:
        """Purposes that were not marked final yet."""
        return {row.purpose for row in self.rows} | {purpose for purpose, _ in self.planned}

    def effects(self) -> list[str]:
        """Purposes that took effect, each as often as it did."""
        return [each.purpose for each in self.transactions if each.is_success and each.purpose]

    def mine(self, count: int, *, strangers: int = 0) -> None:
        """Make a block of the pool's next transactions, or of a stranger's."""
        included: list[Mined] = []
        before = len(self.transactions)
        done = set(self.effects())
        for nonce in range(before, before + count):
            found = next((each for each in self.pool if self.pool[each][0] == nonce), None)
            if strangers:
                strangers -= 1
                included.append(Mined(STRANGER, "", is_success=True))
                continue
            if found is None:
                break
            purpose = self.pool[found][1]
            is_success = purpose not in done and purpose not in self.broken
            included.append(Mined(found, purpose, is_success))
            if is_success:
                done.add(purpose)
        self._made += 1
        self.blocks.append(Block(b"block %d" % self._made, tuple(included)))

    def reorganise(self, count: int, *, forgets: bool) -> None:
        """Drop the newest blocks; their transactions go back to the pool or are forgotten."""
        dropped = self.blocks[max(1, len(self.blocks) - count) :]
        kept = self.blocks[: len(self.blocks) - len(dropped)]
        self.blocks = kept
        if not forgets:
            for row in self.rows:
                for variant in row.variants:
                    self.pool[variant.hash] = (row.nonce, row.purpose)

    def queue(self, purpose: str, job_id: JobId) -> None:
        """Have a transaction signed for a purpose, once."""
        self.planned.append((purpose, job_id))
        self._sign_planned()

    def tick(self) -> None:
        """One view of the chain, and everything that follows."""
        view = self.view()
        actions = decide(self.rows, view, RULES)
        self.halts = halted_jobs(actions)
        for action in actions:
            self._carry_out(action)
        self._sign_planned()

    def retry(self, job_id: JobId) -> None:
        """Clear a job's halt: what it lost is queued again."""
        own = [row for row in self.rows if row.job_id == job_id]
        given_up = abandoned_by_retry(self.rows, job_id, halting_rows(own, self.view()))
        for nonce in given_up:
            row = self._row(nonce)
            self._put(with_fields(row, is_abandoned=True))
            self.queue(row.purpose, job_id)

    def view(self) -> OutboxView:
        """The chain at its tip."""
        tip = len(self.blocks) - 1
        final = [
            each for block in self.blocks[: max(0, tip - DEPTH + 1)] for each in block.transactions
        ]
        asked = {variant.hash for row in self.rows for variant in row.variants}
        return OutboxView(
            block=tip,
            nonce=len(self.transactions),
            final_nonce=len(final),
            block_hashes={number: block.hash for number, block in enumerate(self.blocks)},
            inclusions={
                each.hash: Inclusion(each.hash, number, block.hash, each.is_success)
                for number, block in enumerate(self.blocks)
                for each in block.transactions
                if each.hash in asked
            },
            balance_wei=self.balance_wei,
        )

    def _sign_planned(self) -> None:
        while self.planned and (nonce := next_nonce(self.rows, self.view())) is not None:
            purpose, job_id = self.planned.pop(0)
            row = OutboxRow(nonce=nonce, purpose=purpose, job_id=job_id, variants=())
            self.rows.append(with_fields(row, variants=(self._variant(row),)))

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Halt):
            assert action.fix
            return
        row = self._row(action.nonce)
        match action:
            case SendAgain():
                self._send(row)
            case RaiseFee():
                self._send(with_fields(row, variants=(*row.variants, self._variant(row))))
            case MarkFinal():
                self.rows.remove(row)
                self.finished.extend([] if row.is_abandoned else [row.purpose])
            case MarkMined() | MarkUnmined() | FindFailure():
                self._store_finding(row, action)

    def _store_finding(self, row: OutboxRow, action: MarkMined | MarkUnmined | FindFailure) -> None:
        match action:
            case MarkMined():
                self._put(with_fields(row, inclusion=action.inclusion, failure=None))
            case MarkUnmined():
                self._put(with_fields(row, inclusion=None, failure=None))
            case FindFailure():
                is_present = row.purpose in self.effects()
                self._put(with_fields(row, failure=Failure(is_present, "WrongSequence")))

    def _send(self, row: OutboxRow) -> None:
        self._put(with_fields(row, sent_at_block=len(self.blocks) - 1))
        if row.nonce >= len(self.transactions):
            self.pool = {each: held for each, held in self.pool.items() if held[0] != row.nonce} | {
                row.variants[-1].hash: (row.nonce, row.purpose)
            }

    def _variant(self, row: OutboxRow) -> Variant:
        self._made += 1
        return Variant(
            hash=b"%s %d" % (row.purpose.encode(), self._made),
            raw=b"",
            max_fee_wei=1,
            tip_wei=1,
            gas=21_000,
            signed_at_block=len(self.blocks) - 1,
        )

    def _row(self, nonce: int) -> OutboxRow:
        return next(row for row in self.rows if row.nonce == nonce)

    def _put(self, row: OutboxRow) -> None:
        self.rows = [row if each.nonce == row.nonce else each for each in self.rows]
