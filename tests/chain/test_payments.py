"""Receipts become money, once, and users and operators are told so over PaymentsService."""

from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.ours.metering.host import ENDED, JOB, JobPlan, worth_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.journal.worth import cost, worth
from hypergpu.v1 import payments_pb2 as pb
from payments.shell.anvil import Anvil, KeptAnvil
from payments.shell.ethereum import Ethereum
from payments.shell.service import PaymentsServicer
from tests.chain.world import OnChainPayments, open_payments_on_chain

ONE_ROUND_PLAN = JobPlan(nodes=3, rounds_per_epoch=2, rounds=6)


async def test_nodes_with_stake_are_paid_in_the_block_that_records_their_epoch(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, ONE_ROUND_PLAN) as world:
        await world.stake(ONE_ROUND_PLAN.keys)
        world.work(2)
        await world.step()
        await world.mine()
        assert set((await world.balances()).values()) == {worth_of(2)}


async def test_the_contract_pays_the_worth_of_all_of_a_nodes_work_rounded_down_once(
    tmp_path: Path, anvil: Anvil
) -> None:
    plan = JobPlan(nodes=2, rounds_per_epoch=2, rounds=4, unit_price=13)
    async with open_payments_on_chain(tmp_path, anvil, plan) as world:
        await world.stake(plan.keys)
        for _ in range(2):
            world.work(2)
            await world.step()
            await world.mine()
        scores = [tally.total_score for tally in world.projection.states[JOB].nodes.values()]
        balances = (await world.balances()).values()
        assert list(balances) == [worth(13, score) for score in scores] == [149] * 2
        assert sum(balances) == cost(13, scores)


async def test_nodes_without_stake_are_paid_after_the_window(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, ONE_ROUND_PLAN) as world:
        world.work(6)
        world.host.append(ONE_ROUND_PLAN.job_id, [ENDED])
        await world.until(lambda: not world.waiting_rows())
        assert set((await world.balances()).values()) == {0}
        await world.settle()
        assert set((await world.balances()).values()) == {worth_of(6)}
        for key in ONE_ROUND_PLAN.keys:
            account = await world.account(key.node_id)
            assert (account["counted"], account["earned"]) == (6, worth_of(6))


PLAN = JobPlan(nodes=2, rounds_per_epoch=2, rounds=8)


class Operator:
    """A caller who may read every node's account."""

    own_nodes = None


OPERATOR = cast("Any", Operator())


def servicer(world: OnChainPayments) -> PaymentsServicer:
    return PaymentsServicer(world.projection, world.payments._store, world.connection)


async def ledger(world: OnChainPayments) -> pb.GetLedgerResponse:
    request = pb.GetLedgerRequest(job_id=PLAN.job_id)
    return await servicer(world).get_ledger(request, OPERATOR)


async def test_the_ledger_tells_what_is_recorded_and_paid(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(3)
        await world.settle_rows()
        job_ledger = await ledger(world)
        assert [share.state for share in job_ledger.nodes[0].shares] == ["closed", "measured"]
        assert job_ledger.nodes[0].receipts == 3
        assert int(job_ledger.nodes[0].worth) == worth_of(3)
        assert (int(job_ledger.nodes[0].allotted), int(job_ledger.nodes[0].paid)) == (
            worth_of(2),
            0,
        )
        assert job_ledger.on_chain.is_open
        assert job_ledger.on_chain.batches == 1
        assert {each.state for each in job_ledger.transactions} <= {"mined", "final"}
        world.host.append(PLAN.job_id, [ENDED])
        await world.settle()
        job_ledger = await ledger(world)
        assert job_ledger.is_over
        assert [int(node.paid) for node in job_ledger.nodes] == [worth_of(3)] * 2


async def test_receipts_are_listed_node_by_node(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(3)
        await world.step()
        request = pb.ListReceiptsRequest(job_id=PLAN.job_id)
        receipts_by_node = [
            (message.node_id, [receipt.sequence for receipt in message.receipts])
            async for message in servicer(world).list_receipts(request, OPERATOR)
        ]
        assert receipts_by_node == [
            (key, [0, 1, 2]) for key in sorted(k.node_id for k in PLAN.keys)
        ]


async def test_the_escrow_of_a_running_job_is_not_reclaimed(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        request = pb.RequestReclaimRequest(job_id=PLAN.job_id)
        with pytest.raises(HyperGPUError, match="has not ended") as failure:
            await servicer(world).request_reclaim(request, OPERATOR)
        assert failure.value.reason is Reason.JOB_PHASE
        world.host.append(PLAN.job_id, [ENDED])
        await world.step()
        await servicer(world).request_reclaim(request, OPERATOR)
        await world.until(lambda: world.view.ends_at_s > 0)
        await servicer(world).reclaim(pb.ReclaimRequest(job_id=PLAN.job_id), OPERATOR)
        await world.settle()
        assert world.view.free == 0


async def test_an_unknown_job_is_an_error(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        request = pb.GetLedgerRequest(job_id="job-00000000ffff")
        with pytest.raises(HyperGPUError, match="there is no job"):
            await servicer(world).get_ledger(request, OPERATOR)


async def test_a_local_chain_begins_where_it_was(tmp_path: Path) -> None:
    kept_anvil = KeptAnvil(tmp_path)
    kept_anvil.start()
    chain = Ethereum(kept_anvil.url)
    await chain.ask("anvil_setBalance", "0x" + "ab" * 20, hex(77))
    await chain.ask("evm_mine")
    height = (await chain.head()).number
    await kept_anvil.stop()
    again = KeptAnvil(tmp_path)
    again.start()
    await chain.close()
    chain = Ethereum(again.url)
    assert (await chain.head()).number >= height
    assert int(await chain.ask("eth_getBalance", "0x" + "ab" * 20, "latest"), 16) == 77
    await chain.close()
    await again.stop()
