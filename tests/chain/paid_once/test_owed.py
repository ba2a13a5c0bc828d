"""What a job owes is counted once, whoever else writes to the ledger."""

import pytest

from coordinator.shell.chain.escrow import EscrowReading
from hypergpu.ledger.typed import word_bytes
from tests.chain.ground import ESCROW, JOB, NODES, ORDER, PROFILE, Ground
from tests.signed_receipts import node_key

STRANGER = node_key(99)
EACH = 320 * 9_000 * 1_000 // 10**6
"""What a receipt of the ground earns."""


def reading(ground: Ground) -> EscrowReading:
    """Of a block in which nothing is on its way any more."""
    ground.rest()
    ground.mine()
    ground.turn()
    found = ground.escrow.reading(JOB)
    assert found is not None
    return found


@pytest.mark.parametrize("crashes", [False, True])
def test_receipts_that_a_node_forced_in_are_owed_once(ground: Ground, *, crashes: bool) -> None:
    ground.opened()
    ground.earn(0, range(10))
    ground.force_in(0)
    assert reading(ground).owed == 10 * len(NODES) * EACH
    # The batch passed over the node, whose receipts then came with another.
    assert len(ground.journal.batches(JOB)) == 2
    if crashes:
        ground.crash()
        ground.turn(ORDER)
    ground.earn(0, range(10, 11))
    assert reading(ground).owed == 11 * len(NODES) * EACH
    ground.end(0, is_last=True)
    closed = reading(ground)
    assert (ESCROW - closed.free, closed.owed) == (11 * len(NODES) * EACH, 0)


def test_an_epoch_that_somebody_else_has_closed_is_owed_no_more(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(2))
    before = reading(ground)
    assert (ESCROW - before.free, before.owed) == (0, 2 * len(NODES) * EACH)
    ground.let_pass(PROFILE.window_s + 1)
    site = ground.settler.site
    close = site.calls.abi.call("closeEpoch", word_bytes(site.job_key(JOB)), 0)
    ground.act_as(STRANGER, close)
    # Its job is still in it, and the coordinator knows nothing of the close.
    after = reading(ground)
    assert (ESCROW - after.free, after.owed) == (2 * len(NODES) * EACH, 0)
    assert after.left == before.left
