"""Every purpose takes effect exactly once on the final chain, or its job halts with a fix."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.ids import JobId
from payments.core.outbox import HaltKind
from tests.properties.payments.chain_world import DEPTH, ChainWorld

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
    halted = {row.job_id for row in world.open_rows}
    assert halted == set(world.halts)
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
    refused = world.broken & set(purposes)
    assert set(world.halts) == {purposes[purpose] for purpose in refused} <= {JOB}
    assert set(world.effects()) == set(purposes) - refused
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
