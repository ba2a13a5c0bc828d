"""An escrow that just reaches: what a redeemed voucher takes first is told, and comes back."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core import events
from coordinator.core.job import Account, Job, LedgerSays, Metering, Phase
from coordinator.core.metering.accounts import account_of
from coordinator.core.settlement.epoch import EpochState
from coordinator.shell.metering.settling import Settling
from hypergpu.chain.reading.history import JobReader
from hypergpu.ids import Address, NodeId
from hypergpu.ledger.audit.verify import Verdict, verify
from hypergpu.ledger.terms import Terms, terms_of
from hypergpu.ledger.typed import (
    Voucher,
    address_bytes,
    chain_form,
    sign,
    word_bytes,
)
from hypergpu.signature import IdentityKey
from hypergpu.units import Wei
from tests.chain.ground import JOB, NODES, ORDER, PROFILE, WITHIN_S, Ground
from tests.scenarios.test_metering import PAID, folded, sent
from tests.signed_receipts import COORDINATOR
from tests.unit.job_states import after, at, model

EACH = 320 * 9_000 * 1_000 // 10**6
"""What a receipt of the ground earns."""
EARNED = 2 * EACH
FIRST, *OTHERS = NODES
EXACT = len(NODES) * EARNED


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are locked for each test alone: others use the same one in other processes."""
    monkeypatch.setenv("HOME", str(tmp_path))


def redeem(ground: Ground, node: IdentityKey, amount: int) -> None:
    """Have a node redeem its voucher, which begins that one's window."""
    site = ground.settler.site
    voucher = Voucher(job=site.job_key(JOB), node=node.node_id, sequence=2, amount=Wei(amount))
    signature = chain_form(sign(COORDINATOR, site.domain.separator(), voucher))
    values = (word_bytes(voucher.job), address_bytes(voucher.node), 2, amount)
    ground.act_as(node, site.calls.abi.call("redeemVoucher", values, signature))


def claim(ground: Ground, node: IdentityKey, amount: int) -> None:
    """Have a node redeem its voucher and be paid, once that one's window is over."""
    redeem(ground, node, amount)
    ground.let_pass(PROFILE.window_s + 1)
    site = ground.settler.site
    names = (word_bytes(site.job_key(JOB)), address_bytes(node.node_id))
    ground.act_as(node, site.calls.abi.call("releaseVoucher", *names))


def looked(ground: Ground) -> tuple[str, ...]:
    """What is complained of at a new block."""
    ground.mine()
    return ground.turn().complaints


def verdict(ground: Ground) -> Verdict:
    site = ground.settler.site
    fact = JobReader(ground.chain, site.domain, site.job_key(JOB)).fact()
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
    ground.expect(next_costs)
    ground.earn(0, range(2))
    ground.rest()
    looked(ground)
    before = ground.escrow.reading(JOB)
    assert before is not None
    assert (before.free, before.owed) == (EXACT + next_costs, EXACT)
    claim(ground, FIRST, EARNED)
    if crashes:
        ground.crash()
        ground.turn(order)
        ground.expect(next_costs)
    looked(ground)
    after = ground.escrow.reading(JOB)
    assert after is not None
    assert (before.free - after.free, before.owed - after.owed) == (EARNED, EARNED)
    assert after.left == before.left == next_costs


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


def test_what_a_voucher_advanced_beyond_all_work_is_off_what_is_left_once(ground: Ground) -> None:
    ground.opened(replace(ORDER, escrow=EXACT + 1_000))
    ground.earn(0, range(2))
    ground.rest()
    accounts = {node.node_id: Account(earned=Wei(EARNED), vouched=Wei(EARNED)) for node in NODES}
    accounts[FIRST.node_id] = Account(earned=Wei(EARNED), vouched=Wei(EARNED + 100))
    before = said(ground, accounts)
    claim(ground, FIRST, EARNED + 100)
    assert said(ground, accounts) == before == 900


def test_a_voucher_that_is_redeemed_before_any_receipt_pauses_no_job(ground: Ground) -> None:
    round_cost = PAID.pay.most_for(16)
    ground.opened(replace(ORDER, escrow=2 * round_cost))
    spec = replace(PAID, pay=replace(PAID.pay, escrow=2 * round_cost, guaranteed_bps=5_000))
    nodes = [node.node_id for node in NODES[:2]]
    joined = [
        events.NodeJoined(at_ms=at(20 + number), node=node) for number, node in enumerate(nodes)
    ]
    job = after(
        None,
        events.JobCreated(at_ms=at(0), job_id=JOB, spec=spec, terms=terms(ground)),
        events.ModelInitialised(
            at_ms=at(10), model=model(0), partition_sizes=(spec.stated_samples,)
        ),
        *joined,
    )
    for node in nodes:
        job = after(job, sent(job, node))
    before = says(ground, job)
    redeem(ground, FIRST, account_of(job.metering, FIRST.node_id).vouched)
    assert says(ground, job) == before == round_cost
    told = LedgerSays(left=Wei(before))
    assert after(job, replace(folded(0), ledger=told)).phase is Phase.TRAINING


def said(ground: Ground, accounts: dict[NodeId, Account]) -> int | None:
    """What the next round may cost of a job with such accounts."""
    job = Job(
        job_id=JOB,
        spec=replace(PAID, pay=replace(PAID.pay, escrow=EXACT + 1_000)),
        terms=terms(ground),
        model=model(0),
        metering=Metering(accounts=accounts),
    )
    return says(ground, job)


def terms(ground: Ground) -> Terms:
    return terms_of(Address(COORDINATOR.node_id), JOB, ground.settler.site.domain)


def says(ground: Ground, job: Job) -> int | None:
    """What the next round may cost, by a coordinator that is started with the ground's journal."""
    ground.mine()
    settings = Settings(
        data_dir=ground.folder / "said",
        chain="anvil",
        chain_url=ground.url,
        ledger_contract=ground.settler.contract,
    )
    ground.crash()
    settling = Settling(settings, COORDINATOR, ground.journal)
    settling.order(job)
    settling.start(least_s=WITHIN_S)
    found = settling.says(job)
    settling.stop()
    ground.turn()
    return found.left if found is not None else None


def test_what_was_redeemed_comes_back_with_shares_that_wait_for_their_window(
    ground: Ground,
) -> None:
    next_costs = 4 * EACH
    ground.opened(replace(ORDER, escrow=EXACT + next_costs))
    ground.expect(next_costs)
    ground.earn(0, range(1))
    ground.rest()
    redeem(ground, FIRST, EACH)
    ground.earn(0, range(1, 2))
    ground.end(0)
    ground.rest()
    looked(ground)
    reading = ground.escrow.reading(JOB)
    assert reading is not None
    # Both its advance and the whole pool have left what is free.
    assert (reading.free, reading.owed, reading.coming) == (3 * EACH, 0, EACH)
    assert reading.left == next_costs
    ground.let_pass(PROFILE.window_s + 1)
    ground.mine()
    ground.rest()
    looked(ground)
    after = ground.escrow.reading(JOB)
    assert after is not None
    assert (after.free, after.owed, after.coming) == (next_costs, 0, 0)


def test_the_rest_of_a_short_epoch_is_owed_before_new_work(ground: Ground) -> None:
    ground.opened(replace(ORDER, escrow=EXACT))
    ground.earn(0, range(2))
    ground.rest()
    claim(ground, FIRST, EARNED)
    ground.end(0)
    while not all(epoch.state is EpochState.FINAL for epoch in ground.epochs()):
        ground.rest()
        ground.let_pass(PROFILE.window_s + 1)
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
