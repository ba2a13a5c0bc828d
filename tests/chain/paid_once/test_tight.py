"""An escrow that just reaches: what a redeemed voucher takes first is told, and comes back."""

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import EpochState
from hypergpu.chain.history import JobReader
from hypergpu.ledger.audit.verify import Verdict, verify
from hypergpu.ledger.typed import (
    Voucher,
    address_bytes,
    chain_form,
    sign,
    word_bytes,
)
from hypergpu.signature import IdentityKey
from hypergpu.units import Wei
from tests.chain.ground import JOB, NODES, ORDER, PROFILE, Ground
from tests.signed_receipts import COORDINATOR

EACH = 320 * 9_000 * 1_000 // 10**6
"""What a receipt of the ground earns."""
EARNED = 2 * EACH
FIRST, *OTHERS = NODES
EXACT = len(NODES) * EARNED


def claim(ground: Ground, node: IdentityKey, amount: int) -> None:
    """Have a node redeem its voucher and be paid, once that one's window is over."""
    site = ground.settler.site
    voucher = Voucher(job=site.job_key(JOB), node=node.node_id, sequence=2, amount=Wei(amount))
    signature = chain_form(sign(COORDINATOR, site.domain.separator(), voucher))
    values = (word_bytes(voucher.job), address_bytes(voucher.node), 2, amount)
    ground.act_as(node, site.calls.abi.call("redeemVoucher", values, signature))
    ground.ask("evm_increaseTime", PROFILE.window_s + 1)
    release = site.calls.abi.call("releaseVoucher", *values[:2])
    ground.act_as(node, release)


def looked(ground: Ground) -> tuple[str, ...]:
    """What is complained of at a new block."""
    ground.mine()
    return ground.turn().complaints


def verdict(ground: Ground) -> Verdict:
    site = ground.settler.site
    fact = JobReader(ground.chain, site.domain).fact(site.job_key(JOB))
    receipts = [record.signed for record in ground.journal.receipts(JOB)]
    return verify(fact, receipts)


def told(lacking: int, free: int) -> str:
    short = EARNED
    return (
        f"{JOB} closed epoch 0 {short} short ({EXACT - short} of {EXACT}): more was not free of its"
        " escrow, out of which redeemed vouchers are paid until shares make them good."
        f" {lacking} of it is not paid, {free} is free now: its nodes redeem the rest with"
        " hypergpu ledger claim"
    )


def test_an_epoch_that_a_voucher_made_short_is_told_until_its_nodes_have_the_rest(
    ground: Ground,
) -> None:
    ground.opened(replace(ORDER, escrow=EXACT))
    ground.earn(0, range(2))
    ground.rest()
    claim(ground, FIRST, EARNED)
    ground.end(0, is_last=True)
    ground.settle()
    (epoch,) = ground.epochs()
    assert (epoch.state, epoch.short) == (EpochState.FINAL, EARNED)
    rest = EARNED // len(NODES)
    lacking = rest * len(OTHERS)
    assert looked(ground) == (told(lacking, lacking),)
    found = verdict(ground)
    assert found.wrong == ()
    assert f"epoch 0 fell short: its pool is {EXACT - EARNED}, its score is worth {EXACT}" in [
        one.text for one in found.open
    ]
    assert {one.node for one in found.open if "lack" in one.text} == {
        node.node_id for node in OTHERS
    }

    # It is said after a start as well, when the job is over and nobody orders it any more.
    ground.crash()
    assert looked(ground) == (told(lacking, lacking),)
    for number, node in enumerate(OTHERS, start=1):
        claim(ground, node, EARNED)
        left = lacking - number * rest
        assert looked(ground) == ((told(left, left),) if left else ())
    for node in NODES:
        assert ground.wallet(address_bytes(node.node_id)) == EARNED
    assert all("lack" not in one.text and "short" not in one.text for one in verdict(ground).open)


@pytest.mark.parametrize("crashes", [False, True])
def test_a_node_that_redeems_makes_no_job_short_of_what_it_has_left(
    ground: Ground, *, crashes: bool
) -> None:
    next_costs = 3 * EACH
    order = replace(ORDER, escrow=EXACT + next_costs)
    ground.opened(order)
    ground.earn(0, range(2))
    ground.rest()
    looked(ground)
    before = ground.escrow.reading(JOB)
    assert before is not None
    assert (before.free, before.owed) == (EXACT + next_costs, EXACT)
    assert ground.escrow.shortage(JOB, next_costs) == ""
    claim(ground, FIRST, EARNED)
    if crashes:
        ground.crash()
        ground.turn(order)
    looked(ground)
    after = ground.escrow.reading(JOB)
    assert after is not None
    assert (before.free - after.free, before.owed - after.owed) == (EARNED, EARNED)
    assert ground.escrow.shortage(JOB, next_costs) == ""
    assert "1 less than the next work may cost" in ground.escrow.shortage(JOB, next_costs + 1)


def test_what_a_voucher_advanced_beyond_all_work_is_owed_to_the_others_still(
    ground: Ground,
) -> None:
    ground.opened(replace(ORDER, escrow=EXACT))
    ground.earn(0, range(2))
    ground.rest()
    # Guaranteed for work that was then found to be worth nothing.
    claim(ground, FIRST, EARNED + 100)
    looked(ground)
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert (reading.free, reading.owed) == (EXACT - EARNED - 100, EXACT - EARNED)


def test_the_rest_of_a_short_epoch_is_owed_before_new_work(ground: Ground) -> None:
    ground.opened(replace(ORDER, escrow=EXACT))
    ground.earn(0, range(2))
    ground.rest()
    claim(ground, FIRST, EARNED)
    ground.end(0)
    while not all(epoch.state is EpochState.FINAL for epoch in ground.epochs()):
        ground.rest()
        ground.ask("evm_increaseTime", PROFILE.window_s + 1)
        ground.mine()
    looked(ground)
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert reading.free == reading.owed == EARNED - EARNED // len(NODES)
    for node in OTHERS:
        claim(ground, node, EARNED)
    looked(ground)
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    assert (reading.free, reading.owed) == (0, 0)
