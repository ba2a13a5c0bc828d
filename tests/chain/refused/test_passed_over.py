"""A turn that breaks off where a block passed over receipts: they are recorded all the same."""

from collections.abc import Iterator

import pytest

from hypergpu.chain.rpc.errors import RpcUnreachableError
from tests.chain.ground import JOB, NODES, Ground
from tests.chain.misbehaving_rpc import Answer, MisbehavingRpc, misbehaving
from tests.chain.refused.test_failures import SECOND, said_in
from tests.chain.refused.tokens import REFUSES, WrongToken


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as between:
        ground.url = between.url
        yield between


def test_receipts_that_were_passed_over_are_recorded_though_their_turn_breaks_off(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(3))
    ground.turn()
    ground.force_in(0)
    # Something is to be sent in the turn that hears of it, and cannot be.
    ground.earn(0, range(3, 4), nodes=NODES[1:])
    ground.turn()
    ground.mine()
    rpc.script = lambda calls, _truth: (
        Answer(status=500) if calls[0]["method"] == "eth_sendRawTransaction" else None
    )
    with pytest.raises(RpcUnreachableError):
        ground.turn()
    rpc.script = lambda _calls, _truth: None
    ground.end(0, is_last=True)
    ground.settle()
    assert [ground.account(node.node_id).counted for node in NODES] == [3, 4, 4, 4]


def test_receipts_that_were_passed_over_are_recorded_though_their_turn_halts_and_mends(
    ground: Ground,
) -> None:
    ground.opened()
    token = WrongToken(ground)
    ground.earn(0, range(3))
    ground.turn()
    ground.turn(SECOND)
    ground.turn()
    record = ground.journal.receipt(JOB, NODES[0].node_id, 0)
    assert record is not None
    ground.ask("anvil_setBalance", NODES[0].node_id, hex(10**18))
    ground.send_as(NODES[0], ground.settler.site.calls.record_one(record.signed, 0).call)
    # In one block, and in this order: the receipt, the wrong, the batch, the opening.
    token.wrongs(REFUSES, ground.settler.site.contract)
    assert f"{SECOND.job_id} is left aside" in said_in(ground, 1)
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(3)
