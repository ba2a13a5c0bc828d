"""A replica that has not the newest block, or the state of an old one, holds up little."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.core.settlement.epoch import EpochState
from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.ledger.typed import word_bytes
from tests.chain.ground import JOB, Ground
from tests.chain.misbehaving_rpc import Answer, Behind, MisbehavingRpc, Script, misbehaving
from tests.chain.refused.tokens import set_paused


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as server:
        ground.url = server.url
        yield server


def refuses(*parts: str) -> Script:
    """Has no state for calls with all of these words in them."""

    def script(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        if calls[0]["method"] != "eth_call":
            return None
        if not all(part in calls[0]["params"][0]["data"] for part in parts):
            return None
        refused = {"code": -32000, "message": "missing trie node"}
        answers = [{"jsonrpc": "2.0", "id": call["id"], "error": refused} for call in calls]
        return Answer(json.dumps(answers if truth[:1] == b"[" else answers[0]).encode())

    return script


def test_an_epoch_whose_state_is_gone_is_named_and_the_others_are_settled(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    selector = LedgerCalls().abi.selector("getContribution").hex()
    rpc.script = refuses(selector, word_bytes(ground.settler.site.job_key(JOB)).hex() + f"{0:064x}")
    ground.turn()
    turn = ground.until(lambda _turn: ground.epochs()[1].counted > 0)
    (said,) = turn.complaints
    assert said.startswith(f"epoch 0 of {JOB} waits at block {turn.head.number}: ")
    assert said.endswith("missing trie node (code -32000)")
    assert ground.epochs()[0].state is EpochState.CONFIRMED
    rpc.script = lambda _calls, _truth: None
    ground.settle()
    ground.check_exact(3)


def test_a_replica_a_block_behind_keeps_no_receipt_from_being_sealed(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.rest()
    rpc.script = Behind(1, knows_better=False)
    ground.earn(0, range(1, 2))
    ground.mine()
    # The escrow is read last.
    with pytest.raises(RpcRefusedError, match="Resource not found"):
        ground.turn()
    assert len(ground.journal.batches(JOB)) == 2
    ground.end(0, is_last=True)
    rpc.script = lambda _calls, _truth: None
    ground.settle()
    ground.check_exact(2)


def test_a_pause_is_believed_until_a_replica_tells_of_its_end(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    set_paused(ground, is_paused=True)
    (said,) = ground.turn().complaints
    assert "guardian has paused it" in said
    rpc.script = refuses(LedgerCalls().abi.selector("paused").hex())
    set_paused(ground, is_paused=False)
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    with pytest.raises(RpcRefusedError, match="missing trie node"):
        ground.turn()
    assert ground.journal.batches(JOB) == ()
    rpc.script = lambda _calls, _truth: None
    assert ground.turn().complaints == ()
    assert len(ground.journal.batches(JOB)) == 1
    ground.settle()
    ground.check_exact(1)
