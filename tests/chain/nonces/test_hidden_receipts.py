"""An RPC without the receipt of what is in a block: nothing of value is signed a second time."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pump import HaltError
from hypergpu.chain.rpc.errors import RpcGarbledError
from hypergpu.ids import JobId
from tests.chain.ground import ESCROW, JOB, ORDER, PROFILE, Ground
from tests.chain.misbehaving_rpc import Answer, MisbehavingRpc, Script, lies_about, misbehaving

MORE = replace(ORDER, escrow=2 * ESCROW)
FUND = f"fund/{JOB}/{2 * ESCROW}"
OPEN = f"open/{JOB}"
SECOND = JobId("job-00000000000b")
_UNIT_PRICE = 195
"""Its last byte in a call that opens a job."""
MANY = 12
"""Blocks, each with a turn."""


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as between:
        ground.url = between.url
        yield between


def changed(calls: list[dict[str, Any]], truth: bytes, hidden: set[str]) -> Answer:
    """The truth without receipts of some transactions."""
    answers = json.loads(truth)
    by_id = {call["id"]: call["params"][0] for call in calls}
    for one in answers if isinstance(answers, list) else [answers]:
        if by_id[one["id"]] in hidden:
            one["result"] = None
    return Answer(json.dumps(answers).encode())


def hiding(ground: Ground, purpose: str, *, keeps_state: bool) -> Script:
    """No receipt of a transaction; and no count of old blocks, unless their state is kept."""
    row = ground.journal.transaction_for(ground.settler.site.account, purpose)
    assert row is not None
    hidden = {f"0x{each.attempt.hash.hex()}" for each in row.attempts}
    refused = {"code": -32000, "message": "missing trie node"}

    def script(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        if calls[0]["method"] == "eth_getTransactionReceipt":
            return changed(calls, truth, hidden)
        is_count = calls[0]["method"] == "eth_getTransactionCount"
        if keeps_state or not is_count or calls[0]["params"][1] == "latest":
            return None
        if int(calls[0]["params"][1], 16) >= ground.chain.head().number - PROFILE.depth:
            return None
        answer = {"jsonrpc": "2.0", "id": calls[0]["id"], "error": refused}
        return Answer(json.dumps(answer).encode())

    return script


def signed(ground: Ground, rpc: MisbehavingRpc, purpose: str, *, keeps_state: bool) -> None:
    """An order is signed and comes into a block, and its deposit's receipt is not given."""
    order = ORDER if purpose == OPEN else MORE
    if order is MORE:
        ground.opened()
    else:
        ground.rest()
    ground.turn(order)
    rpc.script = hiding(ground, purpose, keeps_state=keeps_state)
    ground.turn()
    ground.mine(2 * PROFILE.depth + 2)
    ground.trust_rpc()


def turned(ground: Ground) -> str:
    """Some turns with the order given again; what is complained of."""
    said: set[str] = set()
    for _ in range(MANY):
        said |= set(ground.turn(MORE).complaints)
        ground.mine()
    return "; ".join(said)


def check_deposited_once(ground: Ground, rpc: MisbehavingRpc) -> None:
    """Nothing is signed for a deposit beside the first, now and once the RPC tells the truth."""
    assert purposes(ground, "fund/") == (FUND,)
    rpc.script = lambda _calls, _truth: None
    turned(ground)
    ground.rest()
    assert purposes(ground, "fund/") == (FUND,)
    assert free(ground) == 2 * ESCROW


def purposes(ground: Ground, prefix: str) -> tuple[str, ...]:
    return ground.journal.purposes(ground.settler.site.account, prefix)


def free(ground: Ground) -> int:
    job = ground.settler.site.job(JOB)
    assert job is not None
    return job.free


@pytest.mark.parametrize("retries", [False, True])
def test_a_deposit_without_a_receipt_is_found_in_its_block_and_never_signed_again(
    ground: Ground, rpc: MisbehavingRpc, *, retries: bool
) -> None:
    signed(ground, rpc, FUND, keeps_state=True)
    if retries:
        ground.retry_failed()
        ground.trust_rpc()
    said = turned(ground)
    assert f"{FUND} (" in said
    assert "does not give its receipt. Fix: name one that does" in said
    check_deposited_once(ground, rpc)


def test_a_deposit_that_counts_as_somebody_elses_is_looked_for_before_it_is_given_up(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    signed(ground, rpc, FUND, keeps_state=False)
    with pytest.raises(HaltError, match="was not looked for, as eth_getTransactionCount was refus"):
        turned(ground)
    rpc.script = hiding(ground, FUND, keeps_state=True)
    ground.retry_failed()
    turned(ground)
    check_deposited_once(ground, rpc)


def test_a_deposit_of_which_an_rpc_cannot_tell_is_not_signed_again(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    signed(ground, rpc, FUND, keeps_state=False)
    with pytest.raises(HaltError, match="by a transaction that this coordinator did not sign"):
        turned(ground)
    stored = ground.journal.next_nonce(ground.settler.site.account)
    for _ in range(2):
        ground.retry_failed()
        ground.trust_rpc()
        with pytest.raises(HaltError, match=rf"{FUND}\) may have taken effect: .* old state"):
            turned(ground)
    assert ground.journal.next_nonce(ground.settler.site.account) == stored
    rpc.script = lambda _calls, _truth: None
    ground.retry_failed()
    turned(ground)
    ground.rest()
    assert purposes(ground, "fund/") == (FUND,)
    assert free(ground) == 2 * ESCROW


@pytest.mark.parametrize("tells_later", [False, True])
def test_a_job_that_the_ledger_has_as_it_was_ordered_counts_as_opened(
    ground: Ground, rpc: MisbehavingRpc, *, tells_later: bool
) -> None:
    signed(ground, rpc, OPEN, keeps_state=False)
    with pytest.raises(HaltError, match="by a transaction that this coordinator did not sign"):
        turned(ground)
    if tells_later:
        rpc.script = lambda _calls, _truth: None
    ground.retry_failed()
    ground.rest()
    row = ground.journal.transaction_for(ground.settler.site.account, OPEN)
    assert row is not None
    assert row.state is TransactionState.FINAL
    site, head = ground.settler.site, ground.chain.head()
    assert site.is_opened_by(row.transaction, head)
    call = bytearray(row.transaction.call)
    call[_UNIT_PRICE] ^= 1
    assert not site.is_opened_by(replace(row.transaction, call=bytes(call)), head)
    assert not site.is_opened_by(replace(row.transaction, job_id=SECOND), head)
    rpc.script = lambda _calls, _truth: None
    ground.crash()
    ground.turn(ORDER)
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)


def test_a_nonce_that_somebody_else_has_used_is_told_with_its_block(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.turn()
    ground.spend_nonce()
    height = ground.chain.head().number
    ground.mine(41)
    ground.trust_rpc()
    with pytest.raises(HaltError, match=rf"did not sign \(block {height} has used it, and does"):
        turned(ground)
    ground.retry_failed()
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)


def test_an_rpc_that_contradicts_itself_about_a_nonce_is_asked_again(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.turn()
    ground.trust_rpc()
    more = lies_about("eth_getTransactionCount", lambda told: hex(int(told, 16) + 1))
    rpc.script = lambda calls, truth: (
        more(calls, truth) if calls[0]["params"][1:] == ["latest"] else None
    )
    with pytest.raises(RpcGarbledError, match="differently from one answer to the next"):
        ground.turn()
    rpc.script = lambda _calls, _truth: None
    ground.settle()
    ground.check_exact(2)
