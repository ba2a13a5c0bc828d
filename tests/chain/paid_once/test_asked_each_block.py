"""What a block costs its RPC, so that it does not grow with what lies behind a job."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import EpochState
from tests.chain.ground import JOB, NODES, ORDER, Ground
from tests.chain.misbehaving_rpc import MisbehavingRpc
from tests.chain.paid_once.test_tight import EACH, EXACT, FIRST, OTHERS, claim, redeem

ROUND = len(NODES) * EACH
OF_THE_PUMP = 6
"""Requests of two turns: the head, the nonces, and the newest final transaction's block."""
EPOCHS = 6


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    """What counts the requests between the settler and the chain."""
    made = MisbehavingRpc(ground.url)
    made.start()
    ground.url = made.url
    yield made
    ground.crash()
    made.stop()


def asked(ground: Ground, rpc: MisbehavingRpc) -> tuple[int, int]:
    """Requests beside the pump's own, and calls of contracts, for one new block in two turns."""
    ground.mine()
    rpc.asked.clear()
    ground.turn()
    ground.turn()
    calls = sum(methods.count("eth_call") for methods in rpc.asked)
    return len(rpc.asked) - OF_THE_PUMP, calls


def test_a_job_with_escrow_enough_costs_one_request_a_block_however_many_epochs_wait(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    assert asked(ground, rpc) == (1, 2)
    for number in range(2):
        ground.earn(number, [number])
        ground.end(number)
        ground.rest()
        assert asked(ground, rpc) == (1, 2)
    ground.earn(2, [2])
    ground.rest()
    # And the epoch that is open on the ledger.
    assert asked(ground, rpc) == (2, 3)


def test_a_tight_job_costs_requests_that_do_not_grow_with_its_epochs(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened(replace(ORDER, escrow=(EPOCHS + 2) * ROUND - 1))
    ground.expect(ROUND)
    for number in range(EPOCHS):
        ground.earn(number, [number])
        ground.end(number)
        ground.rest()
    of_jobs, of_epochs = 2, EPOCHS
    assert asked(ground, rpc) == (3, of_jobs + len(NODES) + of_epochs)
    ground.earn(EPOCHS, [EPOCHS])
    ground.rest()
    assert asked(ground, rpc) == (4, of_jobs + 1 + len(NODES) + of_epochs + 1)


def test_shares_are_asked_for_of_nodes_that_are_ahead_alone_and_in_one_request(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened(replace(ORDER, escrow=4 * ROUND))
    ground.expect(ROUND)
    ground.earn(0, [0])
    ground.end(0)
    ground.earn(1, [1])
    ground.end(1)
    ground.rest()
    redeem(ground, FIRST, 3 * EACH)
    of_jobs, of_epochs, of_shares = 2, 2, 2
    assert asked(ground, rpc) == (4, of_jobs + len(NODES) + of_epochs + of_shares)


def test_a_job_that_is_over_and_settled_is_asked_for_no_more(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened(replace(ORDER, escrow=ROUND))
    ground.expect(ROUND)
    ground.earn(0, [0])
    ground.end(0, is_last=True)
    ground.settle()
    ground.turn()
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert (reading.free, reading.owed) == (0, 0)
    assert asked(ground, rpc) == (1, 1)
    ground.crash()
    asked(ground, rpc)
    assert asked(ground, rpc) == (1, 1)


def test_a_job_that_is_over_and_was_closed_short_is_asked_for_rarely(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.rarely_blocks = 16
    ground.opened(replace(ORDER, escrow=EXACT))
    ground.earn(0, range(2))
    ground.rest()
    claim(ground, FIRST, EXACT // len(NODES))
    ground.end(0, is_last=True)
    ground.settle()
    assert [epoch.state for epoch in ground.epochs()] == [EpochState.FINAL]
    (said,) = ground.turn().complaints
    assert "closed epoch 0" in said
    for node in OTHERS:
        claim(ground, node, EXACT // len(NODES))
    costs = [asked(ground, rpc) for _ in range(ground.rarely_blocks)]
    # Nothing is asked twice of a final epoch: its job is, and its nodes' accounts.
    of_jobs = 3
    assert costs.count((3, of_jobs + len(NODES))) == 1
    assert costs.count((1, 1)) == ground.rarely_blocks - 1
    assert ground.turn().complaints == ()


def test_a_job_that_was_over_is_looked_at_again_with_the_next_receipt(ground: Ground) -> None:
    ground.opened(replace(ORDER, escrow=2 * ROUND))
    ground.earn(0, [0])
    ground.end(0, is_last=True)
    ground.settle()
    ground.turn()
    ground.earn(1, [1])
    ground.mine()
    ground.turn()
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert (reading.free, reading.owed) == (ROUND, ROUND)
