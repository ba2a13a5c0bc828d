"""A block that comes in the middle of a turn, or is known before it is the newest, misleads nobody.

What is stored is as of the block at which contracts are asked.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.shell.chain.pump import HaltError
from tests.chain.ground import JOB, PROFILE, WAITING, Ground
from tests.chain.misbehaving_rpc import Answer, MisbehavingRpc, Script, misbehaving, once


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as server:
        ground.url = server.url
        yield server


def is_for_head(calls: list[dict[str, Any]]) -> bool:
    asked = calls[0]["method"], calls[0]["params"][:1]
    return asked == ("eth_getBlockByNumber", ["latest"])


def block_behind_head(ground: Ground) -> Script:
    """The chain makes a block just after it was first asked for its newest."""

    def script(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        if not is_for_head(calls):
            return None
        ground.mine()
        return Answer(truth)

    return once(script)


def head_of(number: int) -> Script:
    """Whoever is asked for the newest block is behind; the others are not."""

    def script(calls: list[dict[str, Any]], _truth: bytes) -> Answer | None:
        wanted = [calls[0] | {"params": [hex(number), False]}]
        return Answer(instead=wanted) if is_for_head(calls) else None

    return script


def nothing_wrong(rpc: MisbehavingRpc) -> None:
    rpc.script = lambda _calls, _truth: None


def settles(ground: Ground, rpc: MisbehavingRpc, receipts_each: int) -> None:
    nothing_wrong(rpc)
    ground.settle()
    ground.check_exact(receipts_each)


def test_a_ledger_is_looked_for_in_no_block_before_its_own(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.turn()
    rpc.script = block_behind_head(ground)
    waiting = ground.turn().waiting
    assert waiting > 0
    assert ground.turn().waiting == 0
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    settles(ground, rpc, 1)


def test_what_a_newer_block_holds_is_not_sealed_again(ground: Ground, rpc: MisbehavingRpc) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.rest()
    ground.earn(0, range(2, 4))
    ground.end(0, is_last=True)
    ground.turn()
    ground.turn()
    ground.crash()
    rpc.script = block_behind_head(ground)
    for _ in range(3):
        assert ground.turn().complaints == ()
    settles(ground, rpc, 4)
    assert [sum(span.receipts for span in each.spans) for each in ground.journal.batches(JOB)] == [
        8,
        8,
    ]


def test_an_epoch_is_not_counted_in_a_block_before_its_payments(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.until(lambda turn: turn.waiting == 3)
    rpc.script = block_behind_head(ground)
    turn = ground.turn()
    assert (turn.waiting, turn.mined, turn.complaints, turn.events) == (3, 0, (), ())
    turn = ground.turn()
    assert (turn.waiting, turn.mined, turn.complaints) == (0, 3, ())
    assert turn.events
    settles(ground, rpc, 2)


def test_a_newest_block_that_is_behind_is_no_stranger_with_the_key(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    ground.until(lambda turn: turn.waiting == 3)
    ground.trust_rpc()
    rpc.script = head_of(ground.chain.head().number)
    ground.mine()
    for _ in range(3):
        assert ground.turn().waiting == 3
    # What goes behind them is sent meanwhile.
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    ground.turn()
    ground.turn()
    ground.mine()
    nothing_wrong(rpc)
    turn = ground.turn()
    assert (turn.waiting, turn.complaints) == (0, ())
    settles(ground, rpc, 3)


@pytest.mark.parametrize("crashes", [False, True])
def test_contracts_are_not_asked_in_a_block_before_what_is_stored(
    ground: Ground, rpc: MisbehavingRpc, *, crashes: bool
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.until(lambda turn: turn.waiting == 3)
    older = ground.chain.head().number
    ground.mine()
    ground.until(lambda turn: turn.mined == 3)
    if crashes:
        ground.crash()
    before = ground.epochs()
    rpc.script = head_of(older)
    for _ in range(3):
        turn = ground.turn()
        assert (turn.is_behind, turn.mined, turn.complaints) == (True, 3, ())
    assert ground.epochs() == before
    assert ground.journal.unsealed(1) == ()
    settles(ground, rpc, 2)


def test_nothing_is_sent_behind_what_failed_above_the_newest_block(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.start_with(profile=replace(PROFILE, gas_percent=40))
    ground.earn(0, range(1))
    ground.turn()
    ground.turn()
    rpc.script = head_of(ground.chain.head().number)
    ground.mine()
    ground.earn(0, range(1, 2))
    ground.turn()
    ground.turn()
    rows = ground.journal.transactions(ground.settler.site.account, states=WAITING)
    assert [row.is_sent for row in rows] == [True, False]
    nothing_wrong(rpc)
    with pytest.raises(HaltError, match=r"it failed in block \d+. Nothing is sent behind it"):
        ground.turn()


def test_contracts_are_not_asked_in_a_block_before_what_is_final(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    older = ground.chain.head().number
    ground.earn(0, range(2))
    ground.rest()
    ground.crash()
    rpc.script = head_of(older)
    ground.end(0, is_last=True)
    turn = ground.turn()
    assert (turn.is_behind, turn.waiting, turn.mined, turn.complaints) == (True, 0, 0, ())
    settles(ground, rpc, 2)
