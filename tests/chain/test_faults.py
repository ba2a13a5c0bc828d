"""Faults of the chain, its RPC and the coordinator: every node is paid once, and in full."""

import random
from pathlib import Path

import pytest

from benchmarks.ours.metering.host import ENDED, JobPlan, node_key, worth_of
from hypergpu.crypto import IdentityKey, keccak
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger_terms import Domain, word_bytes
from payments.cli.account import ContractCall
from payments.core.settlement import ReclaimOrder
from payments.core.transactions import HaltKind
from payments.shell.anvil import Anvil, AnvilOptions, keep_state, running_anvil
from payments.shell.chains import ChainUnreachableError
from payments.shell.ethereum import Ethereum, ledger_contract
from payments.shell.ledger_choice import recognise_ledger
from payments.shell.signing import (
    Payload,
    TransactionFee,
    read_transaction,
    record_data,
    sign_transaction,
)
from tests.chain.world import WINDOW_S, OnChainPayments, open_payments_on_chain

PLAN = JobPlan(nodes=3, rounds_per_epoch=2, rounds=40)


async def see_all_paid(world: OnChainPayments, rounds: int) -> None:
    """End the job, settle it, and compare every counter and wallet with the receipts."""
    world.host.append(PLAN.job_id, [ENDED])
    await world.settle()
    assert set((await world.balances()).values()) == {worth_of(rounds)}
    for key in PLAN.keys:
        account = await world.account(key.node_id)
        assert (account["counted"], account["earned"]) == (rounds, worth_of(rounds))
        sequences = [
            signed_receipt.receipt.sequence for signed_receipt in world.host.received[key.node_id]
        ]
        assert len(sequences) == len(set(sequences))


@pytest.mark.parametrize("metering", ["batched", "each"])
async def test_paid_once_through_restarts_and_reorganisations(
    tmp_path: Path, anvil: Anvil, metering: str
) -> None:
    chance = random.Random(3)
    async with open_payments_on_chain(tmp_path, anvil, PLAN, metering=metering) as world:
        await world.mine(12)
        for _ in range(12):
            world.work(1)
            await world.step()
            if chance.random() < 0.4:
                await world.restart()
            await world.mine(chance.randrange(3))
            if chance.random() < 0.4:
                await world.reorganise(chance.choice([2, 8]))
            await world.step()
        await see_all_paid(world, 12)


async def test_a_reorganisation_deeper_than_final_is_sent_again(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        base = (await world.chain.head()).number
        world.work(4)
        await world.until(lambda: not world.connection.queue.rows)
        await world.reorganise((await world.chain.head()).number - base)
        await see_all_paid(world, 4)


async def test_training_goes_on_while_the_chain_is_away(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    options = AnvilOptions(block_time_s=0)
    with running_anvil(options, log_file=tmp_path / "anvil.log") as anvil:
        async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
            await world.mine(5)
            await world.step()
            assert await keep_state(world.chain, state)
            anvil.kill()
            world.work(10)
            with pytest.raises(ChainUnreachableError, match="does not answer"):
                await world.step()
            assert all(len(world.host.received[key.node_id]) == 10 for key in PLAN.keys)
            anvil.options = AnvilOptions(port=anvil.options.port, block_time_s=0, state_file=state)
            anvil.start()
            await world.chain.ask("evm_increaseTime", 3_600)
            await see_all_paid(world, 10)


async def test_an_rpc_that_fails_while_calls_are_sent_changes_nothing(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        queue = world.connection.queue
        reading, away = queue._chain, Ethereum("http://127.0.0.1:9")
        world.work(2)
        await world.projection.advance()
        head = world.settler.head
        assert head is not None
        queue._chain = away
        state = world.projection.states[PLAN.job_id]
        with pytest.raises(ChainUnreachableError):
            await world.settler._settle(state, world.view, head)
        await away.close()
        queue._chain = reading
        await see_all_paid(world, 2)


async def test_a_nonce_taken_by_a_stranger_halts_with_the_fix(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        await world.mine(5)
        await world.step()
        nonce = await world.chain.next_nonce(world.host.key.address)
        world.work(2)
        await world.step()
        fee = TransactionFee(most_wei=10**12, tip_wei=10**11)
        foreign = Payload(bytes(20), b"", 21_000)
        await world.chain.send([sign_transaction(world.host.key, 31337, nonce, foreign, fee)])
        await world.until(lambda: PLAN.job_id in world.settler.halts)
        halt = world.settler.halts[PLAN.job_id]
        assert halt.kind is HaltKind.NONCE_TAKEN
        assert "--retry-payments" in halt.fix
        await world.settler.retry(PLAN.job_id)
        await see_all_paid(world, 2)


async def test_a_refused_call_halts_its_job_until_it_is_retried(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        ledger = world.connection.addresses.ledger
        code = await world.chain.code(ledger)
        world.work(2)
        await world.step()
        await world.chain.ask("anvil_setCode", ledger, "0x60006000fd")
        await world.mine()
        await world.chain.ask("anvil_setCode", ledger, "0x" + code.hex())
        await world.step()
        await world.mine()
        await world.step()
        assert world.settler.halts[PLAN.job_id].kind is HaltKind.REVERTED
        await world.restart(retry_payments="1")
        await world.step()
        await see_all_paid(world, 2)


async def test_stuck_transactions_get_a_higher_fee(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        await world.mine(2)
        await world.step()
        world.work(2)
        await world.step()
        for _ in range(12):
            await world.chain.ask("anvil_setNextBlockBaseFeePerGas", hex(60 * 10**9))
            await world.mine()
            await world.step()
        row = max(world.connection.queue.rows, key=lambda row: len(row.variants), default=None)
        assert row is None or read_transaction(row.variants[-1].raw)[1].most_wei > 10**11
        await see_all_paid(world, 2)


async def test_another_chain_is_refused_at_the_start(tmp_path: Path) -> None:
    options = AnvilOptions(block_time_s=0, chain_id=4242)
    with running_anvil(options, log_file=tmp_path / "anvil.log") as anvil:
        world = OnChainPayments(tmp_path, anvil, PLAN)
        with pytest.raises(HyperGPUError, match="is of chain 4242, not of 31337") as failure:
            await world.payments.start()
        assert failure.value.reason is Reason.CHAIN_WRONG
        await world.close()


async def test_a_contract_that_is_no_ledger_is_refused(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        token = world.connection.addresses.token
        with pytest.raises(HyperGPUError, match="no training ledger"):
            await recognise_ledger(world.chain, Domain(31337, token))
        nobody = node_key(99).address
        with pytest.raises(HyperGPUError, match="there is no contract"):
            await recognise_ledger(world.chain, Domain(31337, nobody))


async def test_a_vanished_coordinator_that_undercounted_leaves_nobody_unpaid(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(2)
        await world.settle_rows()
        world.work(5)
        await world.projection.advance()
        # From here on the coordinator does nothing: its nodes hold five receipts more.
        contract, target = ledger_contract(), world.connection.addresses
        job = word_bytes(world.terms.job)
        await world.chain.ask("evm_setAutomine", True)
        for key in PLAN.keys:
            wallet = await world.wallet(key)
            newest = world.host.received[key.node_id][-1]
            record = ContractCall(
                contract, target.ledger, record_data(newest, newest.receipt.epoch)
            )
            await wallet.send(record)
        await world.pass_time(WINDOW_S + 1)
        wallet = await world.wallet(PLAN.keys[0])
        epoch = world.host.received[PLAN.keys[0].node_id][-1].receipt.epoch
        close = contract.encode("closeEpoch", job, epoch)
        await wallet.send(ContractCall(contract, target.ledger, close))
        await world.pass_time(WINDOW_S + 1)
        nodes = [key.address for key in PLAN.keys]
        for each in (0, epoch):
            pay = contract.encode("distributePayments", job, each, nodes)
            await wallet.send(ContractCall(contract, target.ledger, pay))
        assert set((await world.balances()).values()) == {worth_of(7)}


async def test_a_raised_escrow_pays_what_was_short(tmp_path: Path, anvil: Anvil) -> None:
    short = JobPlan(nodes=3, rounds_per_epoch=2, rounds=40, escrow=3 * worth_of(3))
    async with open_payments_on_chain(tmp_path, anvil, short) as world:
        world.work(4)
        await world.settle_rows()
        escrow_row = short.escrow_row(3 * worth_of(10))
        world.host.append(short.job_id, [escrow_row])
        await world.until(lambda: world.view.capacity >= 3 * worth_of(10))
        funded_samples, _ = world.host.funding[short.job_id]
        assert funded_samples is not None
        assert funded_samples >= 10 * 3 * 320 * 9 // 10
        await see_all_paid(world, 4)


async def test_the_rest_of_the_escrow_goes_back_after_the_notice(
    tmp_path: Path, anvil: Anvil
) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(2)
        await see_all_paid(world, 2)
        world.settler.order_reclaim(PLAN.job_id, ReclaimOrder.TAKE)
        await world.settle()
        assert world.view.ends_at_s > 0
        assert world.view.free == 0


async def test_a_receipt_of_a_longer_journal_is_taken_over(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(4)
        await world.settle_rows()
        node = PLAN.keys[0].node_id
        newest = world.host.received[node][-1]
        other = tmp_path / "other"
        other.mkdir()
        older = OnChainPayments(
            other, anvil, PLAN, ledger_contract=world.connection.addresses.ledger
        )
        await older.payments.start()
        rows = [(row.kind, row) for row in world.host.rows(PLAN.job_id, 0, 4)]
        older.host.copy(PLAN.job_id, [row for _, row in rows])
        await older.projection.advance()
        assert older.projection.states[PLAN.job_id].nodes[node].count == 2
        await older.projection.greet(node, {PLAN.job_id: newest})
        assert older.projection.states[PLAN.job_id].nodes[node].count == 4
        older.round = 4
        older.work(1)
        await older.projection.advance()
        assert older.host.received[node][-1].receipt.sequence == 4
        assert older.host.received[node][-1].receipt.total_score == 5 * 320 * 9_000
        await older.close()


async def test_a_forged_receipt_is_not_taken_over(tmp_path: Path, anvil: Anvil) -> None:
    async with open_payments_on_chain(tmp_path, anvil, PLAN) as world:
        world.work(1)
        await world.step()
        key = PLAN.keys[0]
        forger = IdentityKey(keccak(b"a forger"))
        fact = PLAN.round_row(5, world.terms, [key])[1]
        forged_receipt = PLAN.receipt(fact.updates[0], forger, world.terms, sequence=5)
        await world.projection.greet(key.node_id, {PLAN.job_id: forged_receipt})
        assert world.projection.states[PLAN.job_id].nodes[key.node_id].count == 1


async def test_secrets_in_the_rpc_address_are_never_shown() -> None:
    chain = Ethereum("http://user:hunter2@127.0.0.1:9/v2/SECRET?key=SECRET")
    with pytest.raises(ChainUnreachableError) as away:
        await chain.head()
    await chain.close()
    assert "SECRET" not in str(away.value)
    assert "hunter2" not in str(away.value)


async def test_token_and_ledger_are_known_before_they_are_mined(
    tmp_path: Path, anvil: Anvil
) -> None:
    world = OnChainPayments(tmp_path, anvil, PLAN)
    await world.payments.start()
    contract = world.terms.domain.contract
    await world.restart()
    assert world.terms.domain.contract == contract
    assert not await world.chain.code(contract)
    await world.mine()
    assert await world.chain.code(contract)
    await world.close()
