from collections.abc import Iterator

import pytest
from coordinator.core.settlement.patience import MOST_MS
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pump import HaltError
from msgspec.structs import replace

from hypergpu.chain.keylock import KeyLock
from hypergpu.chain.rpc.errors import RpcLimitedError, RpcUnreachableError
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from tests.chain.ground import PROFILE, Ground
from tests.chain.misbehaving_rpc import FAULTS, MisbehavingRpc, misbehaving
from tests.signed_receipts import COORDINATOR, node_key

ALL = [TransactionState.WAITING, TransactionState.MINED]


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as server:
        ground.url = server.url
        yield server


def take_turns(ground: Ground, count: int) -> str:
    """Gives what was wrong in them."""
    complaints: list[str] = []
    for _ in range(count):
        complaints += ground.turn().complaints
        ground.mine()
    return "; ".join(complaints)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_rpc_that_goes_wrong_is_named_and_nothing_is_lost_or_paid_twice(
    ground: Ground, rpc: MisbehavingRpc, fault: str
) -> None:
    ground.opened()
    script, error, words = FAULTS[fault]
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    rpc.script = script
    if fault == "silent":
        ground.lose_patience()
    if error is None:
        assert words in take_turns(ground, 4)
    else:
        with pytest.raises(error, match=words):
            take_turns(ground, 4)
    rpc.script = lambda _calls, _truth: None
    ground.crash()
    ground.settle()
    ground.check_exact(2)


def test_an_rpc_that_says_when_is_left_alone_until_then(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    rpc.script = FAULTS["limited"][0]
    with pytest.raises(RpcLimitedError) as caught:
        ground.turn()
    assert caught.value.wait_ms == 7_000
    assert caught.value.wait_ms < MOST_MS


def test_a_chain_that_is_down_at_the_start_and_in_the_middle_only_delays(ground: Ground) -> None:
    ground.anvil.options = replace(ground.anvil.options, state_file=ground.folder / "state.json")
    ground.anvil.stop()
    ground.earn(0, range(2))
    with pytest.raises(RpcUnreachableError, match="nobody listens there"):
        ground.turn()
    ground.anvil.start()
    ground.crash()
    ground.opened()
    ground.end(0)
    ground.turn()
    ground.anvil.stop()
    with pytest.raises(RpcUnreachableError):
        ground.turn()
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    ground.anvil.start()
    ground.settle()
    ground.check_exact(3)


@pytest.mark.parametrize("depth", [3, 12])
def test_a_reorganisation_is_settled_again_with_the_same_bytes(ground: Ground, depth: int) -> None:
    ground.opened()
    ground.mine(12)
    ground.earn(0, range(2))
    ground.end(0)
    ground.rest()
    before = ground.journal.newest_final(ground.settler.site.account, 99)
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    ground.turn()
    ground.mine()
    ground.turn()
    ground.ask("anvil_reorg", depth, [])
    ground.settle()
    ground.check_exact(3)
    after = {
        row.transaction.nonce: row
        for row in ground.journal.newest_final(ground.settler.site.account, 99)
    }
    assert all(after[row.transaction.nonce].attempts == row.attempts for row in before)


def test_a_chain_that_was_begun_anew_is_built_again_from_the_outbox(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.rest()
    ground.anvil.kill()
    ground.anvil.start()
    ground.crash()
    ground.mine(40)
    ground.settle()
    ground.check_exact(2)


def test_a_transaction_that_no_block_takes_gets_a_higher_fee(ground: Ground) -> None:
    ground.options = replace(ground.options, profile=replace(ground.options.profile, bump_blocks=2))
    ground.opened()
    ground.earn(0, range(1))
    ground.turn()
    ground.ask("anvil_setNextBlockBaseFeePerGas", hex(50 * 10**9))
    ground.ask("anvil_mine", hex(1))
    for _ in range(3):
        ground.turn()
        ground.ask("anvil_setNextBlockBaseFeePerGas", hex(50 * 10**9))
        ground.mine()
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(1)
    rows = ground.journal.newest_final(ground.settler.site.account, 99)
    assert max(len(row.attempts) for row in rows) > 1


def test_what_is_stuck_beneath_the_fee_cap_waits_and_is_reported(ground: Ground) -> None:
    ground.opened()
    cap = ground.chain.head().base_fee_wei * 3 + PROFILE.tip_wei
    ground.options = replace(
        ground.options,
        profile=replace(ground.options.profile, bump_blocks=1, max_fee_cap_wei=cap),
    )
    ground.crash()
    ground.earn(0, range(1))
    ground.turn()
    complaints: list[str] = []
    for _ in range(4):
        ground.ask("anvil_setNextBlockBaseFeePerGas", hex(500 * 10**9))
        ground.mine()
        complaints += ground.turn().complaints
    assert any("the fee cap of the chain's profile is reached" in each for each in complaints)


def test_a_nonce_that_fell_out_of_the_pool_is_sent_again(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    ground.turn()
    ground.turn()
    rows = ground.journal.transactions(ground.settler.site.account, states=ALL)
    first = rows[0].attempts[0].attempt.hash
    ground.ask("anvil_dropTransaction", "0x" + first.hex())
    ground.mine()
    assert ground.chain.inclusions([first]) == [None]
    ground.settle()
    ground.check_exact(1)


def test_what_is_on_its_way_is_looked_at_again_with_the_next_block(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.options = replace(ground.options, profile=replace(PROFILE, resend_ms=60_000))
    ground.opened()
    ground.earn(0, range(1))
    ground.turn()
    assert ground.turn().waiting == 1
    rpc.asked.clear()
    assert ground.turn().waiting == 1
    assert rpc.asked == [["eth_getBlockByNumber"]]
    ground.mine()
    turn = ground.turn()
    assert (turn.waiting, turn.mined) == (0, 1)
    rpc.asked.clear()
    again = ground.turn()
    assert (again.waiting, again.mined, again.events) == (0, 1, ())
    assert rpc.asked == [["eth_getBlockByNumber"]]
    ground.end(0, is_last=True)
    ground.turn()
    assert ground.turn().waiting > 0
    ground.settle()
    ground.check_exact(1)


def test_a_reorganisation_is_noticed_while_everything_rests(ground: Ground) -> None:
    ground.options = replace(ground.options, profile=replace(PROFILE, resend_ms=60_000))
    ground.opened()
    ground.earn(0, range(2))
    ground.turn()
    ground.turn()
    ground.mine()
    assert ground.turn().mined == 1
    ground.turn()
    ground.ask("anvil_reorg", 1, [])
    ground.turn()
    assert ground.turn().waiting == 1
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)


def test_a_key_that_is_used_elsewhere_is_noticed(ground: Ground) -> None:
    ground.opened()
    ground.send_as(COORDINATOR)
    ground.mine()
    ground.crash()
    with pytest.raises(HyperGPUError, match="has seen") as caught:
        ground.turn()
    assert caught.value.reason is Reason.LEDGER_AHEAD


def test_a_transaction_that_fails_stops_everything_behind_it(ground: Ground) -> None:
    ground.opened()
    ground.options = replace(ground.options, profile=replace(PROFILE, gas_percent=40))
    ground.crash()
    ground.earn(0, range(1))
    ground.end(0)
    ground.turn()
    ground.turn()
    ground.mine()
    with pytest.raises(HaltError, match=r"it failed in block \d+. Nothing is sent behind it"):
        ground.turn()
    ground.crash()
    with pytest.raises(HaltError, match=r"batch/job-00000000000a/0, 0x[0-9a-f]{64}"):
        ground.turn()
    ground.crash()
    ground.options = replace(ground.options, profile=PROFILE, retries_failed=True)
    ground.crash()
    ground.earn(1, range(1, 2))
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(2)


def test_a_wrong_chain_is_refused_before_anything_is_signed(ground: Ground) -> None:
    ground.options = replace(ground.options, profile=replace(PROFILE, chain_id=10_143))
    with pytest.raises(HyperGPUError, match="is of chain 31337, not of 10143") as caught:
        ground.turn()
    assert caught.value.reason is Reason.CHAIN_WRONG


@pytest.mark.parametrize(
    ("contract", "words"),
    [("0x" + "12" * 20, "there is no contract at 0x1212"), ("token", "is no training ledger")],
)
def test_a_ledger_that_is_not_there_or_another_contract_is_refused(
    ground: Ground, contract: str, words: str
) -> None:
    ground.opened()
    address = "0x" + ground.settler.site.token().hex() if contract == "token" else contract
    ground.crash()
    ground.options = replace(ground.options, contract=Address(address))
    with pytest.raises(HyperGPUError, match=words) as caught:
        ground.turn()
    assert caught.value.reason is Reason.LEDGER_WRONG


def test_what_is_no_ledger_is_told_before_a_nonce_that_somebody_else_has_used(
    ground: Ground,
) -> None:
    ground.opened()
    token = Address("0x" + ground.settler.site.token().hex())
    ground.spend_nonce()
    ground.start_with(contract=token)
    with pytest.raises(HyperGPUError, match="is no training ledger") as caught:
        ground.turn()
    assert caught.value.reason is Reason.LEDGER_WRONG


def test_a_ledger_with_other_code_is_refused(ground: Ground) -> None:
    ground.opened()
    contract = "0x" + ground.settler.site.contract.hex()
    code = bytearray(ground.chain.code(ground.settler.site.contract))
    # Where no immutable value lies: a stretch of code without a zero.
    at = next(n for n in range(1_000, len(code)) if 0 not in code[n : n + 8])
    code[at] ^= 0xFF
    ground.ask("anvil_setCode", contract, "0x" + code.hex())
    ground.crash()
    ground.options = replace(ground.options, contract=Address(contract))
    with pytest.raises(HyperGPUError, match="has other code than this version's"):
        ground.turn()


def test_a_key_has_one_writer(ground: Ground) -> None:
    name = PROFILE.chain_id, Address(node_key(1).node_id)
    held = KeyLock(ground.folder, *name)
    with pytest.raises(HyperGPUError, match="is used on chain 31337 by another process"):
        KeyLock(ground.folder, *name)
    held.release()
    KeyLock(ground.folder, *name).release()


def test_receipts_that_were_forced_in_before_their_batch_are_recorded_once(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(3))
    ground.force_in(0)
    ground.end(0)
    ground.earn(1, range(3, 4))
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(4)


def test_receipts_that_were_forced_in_behind_a_restarts_back_are_recorded_once(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(3))
    ground.force_in(0)
    ground.force_in(1)
    ground.crash()
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(3)
