"""Receipts become money, once."""

from pathlib import Path

from benchmarks.ours.metering.host import ENDED, JobPlan, worth_of
from payments.shell.anvil import Anvil
from tests.chain.world import open_payments_on_chain

PLAN = JobPlan(nodes=3, rounds_per_epoch=2, rounds=6)


async def test_nodes_with_stake_are_paid_in_the_block_that_records_their_epoch(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        await world.stake(PLAN.keys)
        world.work(2)
        await world.step()
        await world.mine()
        assert set((await world.balances()).values()) == {worth_of(2)}


async def test_nodes_without_stake_are_paid_after_the_window(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(6)
        world.host.append(PLAN.job_id, [ENDED])
        await world.until(lambda: not world.waiting_rows())
        assert set((await world.balances()).values()) == {0}
        await world.settle()
        assert set((await world.balances()).values()) == {worth_of(6)}
        for key in PLAN.keys:
            account = await world.account(key.node_id)
            assert (account["counted"], account["earned"]) == (6, worth_of(6))
