"""Every purpose takes effect exactly once on the final chain, or its job halts with a fix."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from hypergpu.ids import JobId
from payments.core.transactions import (
    Halt,
    HaltKind,
    Inclusion,
    OutboxRow,
    OutboxRules,
    OutboxView,
    Variant,
    decide,
    next_nonce,
    nonces_to_retry,
)

DEPTH = 4
RULES = OutboxRules(depth=DEPTH, bump_blocks=3)
STRANGER = b"somebody else's"


class MinedTransaction(NamedTuple):
    """One transaction of the account in a block; ``purpose`` is empty for a stranger's."""

    hash: bytes
    purpose: str
    is_success: bool


@dataclass
class ChainWorld:
    """The chain, the pool, and the coordinator's queue on top of them."""

    blocks: list[tuple[MinedTransaction, ...]] = field(default_factory=lambda: [()])
    """The account's transactions of each block."""
    pool: dict[bytes, tuple[int, str]] = field(default_factory=dict)
    """Nonce and purpose of each variant that the pool holds."""
    planned: list[tuple[str, JobId]] = field(default_factory=list)
    rows: dict[int, OutboxRow] = field(default_factory=dict)
    """Every row by its nonce, closed ones too, as they are stored."""
    broken: set[str] = field(default_factory=set)
    """Purposes that the contract refuses."""
    halts: Mapping[JobId | None, Halt] = field(default_factory=dict)
    balance_wei: int = 10**18
    _made: int = 0

    @property
    def transactions(self) -> list[MinedTransaction]:
        """The account's transactions in nonce order."""
        return [each for block in self.blocks for each in block]

    @property
    def open_rows(self) -> list[OutboxRow]:
        """Rows that are not closed."""
        return [row for row in self.rows.values() if not row.is_closed]

    @property
    def closed_purposes(self) -> list[str]:
        """Purposes whose rows were closed with their effect."""
        return [row.purpose for row in self.rows.values() if row.is_closed and not row.is_abandoned]

    def purposes(self) -> set[str]:
        """Every purpose that was queued."""
        return {row.purpose for row in self.rows.values()} | {each for each, _ in self.planned}

    def effects(self) -> list[str]:
        """Purposes that took effect, each as often as it did."""
        return [each.purpose for each in self.transactions if each.is_success and each.purpose]

    def mine(self, count: int, *, strangers: int = 0) -> None:
        """Make a block of the pool's next transactions, or of a stranger's."""
        mined_transactions: list[MinedTransaction] = []
        before = len(self.transactions)
        done_purposes = set(self.effects())
        for nonce in range(before, before + count):
            pool_hash = next((each for each in self.pool if self.pool[each][0] == nonce), None)
            if strangers:
                strangers -= 1
                mined_transactions.append(MinedTransaction(STRANGER, "", is_success=True))
                continue
            if pool_hash is None:
                break
            purpose = self.pool[pool_hash][1]
            is_success = purpose not in done_purposes and purpose not in self.broken
            mined_transactions.append(MinedTransaction(pool_hash, purpose, is_success))
            if is_success:
                done_purposes.add(purpose)
        self.blocks.append(tuple(mined_transactions))

    def reorganise(self, count: int, *, forgets: bool) -> None:
        """Drop the newest blocks; their transactions go back to the pool or are forgotten."""
        del self.blocks[max(1, len(self.blocks) - count) :]
        if not forgets:
            for row in self.rows.values():
                for variant in row.variants:
                    self.pool[variant.hash] = (row.nonce, row.purpose)

    def queue(self, purpose: str, job_id: JobId) -> None:
        """Have a transaction signed for a purpose, once."""
        self.planned.append((purpose, job_id))
        self._sign_planned()

    def tick(self) -> None:
        """One view of the chain, and everything that follows."""
        view = self.view()
        actions = decide(self._seen_rows(), view, RULES)
        self.halts = actions.halts
        for nonce in actions.close:
            self.rows[nonce] = with_fields(self.rows[nonce], is_closed=True)
        for nonce in actions.send:
            self._send(self.rows[nonce])
        for nonce in actions.raise_fee:
            row = self.rows[nonce]
            self._send(with_fields(row, variants=(*row.variants, self._variant(row.purpose))))
        self._sign_planned()

    def retry(self, job_id: JobId) -> None:
        """Clear a job's halt: what it lost is queued again."""
        for nonce in nonces_to_retry(self._seen_rows(), job_id, self.view()):
            row = with_fields(self.rows[nonce], is_abandoned=True, is_closed=True)
            self.rows[nonce] = row
            self.queue(row.purpose, job_id)

    def view(self) -> OutboxView:
        """The account at the tip."""
        tip = len(self.blocks) - 1
        done_purposes = set(self.effects())
        return OutboxView(
            block=tip,
            nonce=len(self.transactions),
            final_nonce=sum(len(block) for block in self.blocks[: max(0, tip - DEPTH + 1)]),
            balance_wei=self.balance_wei,
            idle_blocks=next((at for at, block in enumerate(reversed(self.blocks)) if block), tip),
            reverted={
                nonce: "WrongSequence"
                for nonce, each in enumerate(self.transactions)
                if not each.is_success and each.purpose not in done_purposes
            },
        )

    def _seen_rows(self) -> list[OutboxRow]:
        """Rows that are pending or not closed, with their places on the chain."""
        places = {
            each.hash: Inclusion(each.hash, height, each.is_success)
            for height, block in enumerate(self.blocks)
            for each in block
        }
        nonce = len(self.transactions)
        seen_rows = []
        for row in self.rows.values():
            own = [places[each.hash] for each in row.variants if each.hash in places]
            if row.nonce >= nonce or not row.is_closed:
                seen_rows.append(with_fields(row, inclusion=own[0] if own else None))
        return seen_rows

    def _sign_planned(self) -> None:
        highest = 1 + max(self.rows, default=-1)
        while self.planned and (nonce := next_nonce(highest, self.view())) is not None:
            purpose, job_id = self.planned.pop(0)
            variants = (self._variant(purpose),)
            row = OutboxRow(nonce=nonce, purpose=purpose, job_id=job_id, variants=variants)
            self.rows[nonce] = row
            highest = nonce + 1

    def _send(self, row: OutboxRow) -> None:
        self.rows[row.nonce] = row
        self.pool = {each: pair for each, pair in self.pool.items() if pair[0] != row.nonce} | {
            row.variants[-1].hash: (row.nonce, row.purpose)
        }

    def _variant(self, purpose: str) -> Variant:
        self._made += 1
        name = b"%s %d" % (purpose.encode(), self._made)
        return Variant(hash=name, raw=b"", cost_wei=21_000, signed_at_block=len(self.blocks) - 1)


JOB = JobId("job-000000000001")
OTHER = JobId("job-000000000002")


@dataclass(frozen=True)
class Step:
    """One thing that happens to the world."""

    kind: str
    count: int = 0

    def happen(self, world: ChainWorld, *, with_strangers: bool) -> None:
        match self.kind:
            case "queue":
                number = len(world.purposes())
                world.queue(f"purpose {number} {self.count}", JOB if self.count % 2 else OTHER)
            case "mine":
                world.mine(self.count)
            case "stranger":
                world.mine(self.count, strangers=1 if with_strangers else 0)
            case "forget":
                world.pool.clear()
            case "reorganise":
                world.reorganise(min(self.count, DEPTH - 1), forgets=self.count % 2 == 0)
            case _:
                world.tick()


kinds = ["queue", "queue", "tick", "tick", "tick", "mine", "mine", "forget", "reorganise"]
steps = st.lists(
    st.builds(Step, st.sampled_from([*kinds, "stranger"]), st.integers(0, 4)), max_size=60
)


def quiet(world: ChainWorld) -> None:
    """Let the world go on until everything that can be final is."""
    for _ in range(4 * DEPTH + 2 * len(world.rows)):
        world.tick()
        world.mine(9)
    world.tick()


@settings(max_examples=300)
@given(steps=steps)
def test_without_strangers_every_purpose_takes_effect_exactly_once(steps: list[Step]) -> None:
    world = ChainWorld()
    for step in steps:
        step.happen(world, with_strangers=False)
    quiet(world)
    assert world.halts == {}
    assert world.open_rows == []
    assert sorted(world.effects()) == sorted(world.purposes()) == sorted(world.closed_purposes)


@settings(max_examples=300)
@given(steps=steps)
def test_with_strangers_a_purpose_takes_effect_or_its_job_halts_until_retried(
    steps: list[Step],
) -> None:
    world = ChainWorld()
    for step in steps:
        step.happen(world, with_strangers=True)
    quiet(world)
    halted_jobs = {row.job_id for row in world.open_rows}
    assert halted_jobs == set(world.halts)
    assert {halt.kind for halt in world.halts.values()} <= {HaltKind.NONCE_TAKEN}
    assert set(world.effects()) == world.purposes() - {row.purpose for row in world.open_rows}
    for job_id in (JOB, OTHER):
        world.retry(job_id)
    quiet(world)
    assert world.halts == {}
    assert sorted(world.effects()) == sorted(world.purposes())


@settings(max_examples=200)
@given(steps=steps, broken=st.sets(st.integers(0, 8)))
def test_a_refused_call_halts_its_job_alone_until_the_cause_is_gone(
    steps: list[Step], broken: set[int]
) -> None:
    world = ChainWorld(broken={f"purpose {place} {count}" for place in broken for count in (1, 3)})
    for step in steps:
        step.happen(world, with_strangers=False)
    quiet(world)
    purposes = {row.purpose: row.job_id for row in world.rows.values()}
    refused_purposes = world.broken & set(purposes)
    assert set(world.halts) == {purposes[purpose] for purpose in refused_purposes} <= {JOB}
    assert set(world.effects()) == set(purposes) - refused_purposes
    world.broken.clear()
    world.retry(JOB)
    quiet(world)
    assert sorted(world.effects()) == sorted(purposes)
    assert not world.halts


def test_a_revert_whose_effect_is_there_already_halts_nothing() -> None:
    world = ChainWorld()
    world.queue("batch", JOB)
    world.tick()
    world.mine(1)
    world.tick()
    world.queue("batch", JOB)
    quiet(world)
    assert (world.effects(), world.halts, world.open_rows) == (["batch"], {}, [])


def test_a_fee_is_raised_after_some_blocks_without_inclusion() -> None:
    world = ChainWorld()
    world.queue("batch", JOB)
    world.tick()
    variants = []
    for _ in range(4):
        world.pool.clear()
        world.mine(0)
        world.tick()
        variants.append(len(world.rows[0].variants))
    assert variants == [1, 1, 2, 2]
    assert list(world.pool) == [world.rows[0].variants[-1].hash]


def test_an_older_variant_in_a_block_counts() -> None:
    world = ChainWorld()
    world.queue("batch", JOB)
    world.tick()
    first = dict(world.pool)
    for _ in range(3):
        world.pool.clear()
        world.mine(0)
        world.tick()
    assert len(world.rows[0].variants) == 2
    world.pool = first
    quiet(world)
    assert world.closed_purposes == ["batch"]


@pytest.mark.parametrize("balance", [0, 20_999])
def test_missing_gas_money_is_said_and_goes_on_by_itself(balance: int) -> None:
    world = ChainWorld(balance_wei=balance)
    world.queue("batch", JOB)
    world.tick()
    assert world.halts[None].kind is HaltKind.KEY_FUNDS
    assert f"{balance} wei" in world.halts[None].reason
    world.balance_wei = 21_000
    quiet(world)
    assert (world.halts, world.closed_purposes) == ({}, ["batch"])
