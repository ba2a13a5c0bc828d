"""Where each node's pay stands, asked of a ledger whose blocks a test makes."""

from hypergpu.cli.ledger.tiers.asking import PayReader
from hypergpu.cli.ledger.tiers.standing import CLAIM, Due, NodeTiers, PayView
from hypergpu.ids import JobKey
from hypergpu.ledger.typed import Voucher, address_bytes, chain_form, sign, word_bytes
from hypergpu.units import Wei
from tests.chain.ground import JOB, NODES, PROFILE, UNIT_PRICE, Ground
from tests.signed_receipts import COORDINATOR

SHARE = 320 * 9_000 * UNIT_PRICE // 10**6
VOUCHED = 3 * SHARE
FOR_CERTAIN = SHARE - 1
"""Of a share while its epoch is open: its pool and it are still to be rounded down."""
FIRST = NODES[0]


def pay_of(ground: Ground) -> PayView:
    site = ground.settler.site
    assert site.domain is not None
    nodes = {node.node_id: VOUCHED for node in NODES}
    pay = PayReader(ground.chain, site.domain).pay(site.job_key(JOB), nodes, range(3))
    assert pay is not None
    return pay


def first(ground: Ground) -> NodeTiers:
    return next(node for node in pay_of(ground).nodes if node.id == FIRST.node_id)


def figures(ground: Ground) -> tuple[int, int, int, int, int]:
    """Vouched, recorded, paid, final and pending of the first node."""
    found = first(ground)
    told = (found.vouched, found.recorded, found.paid, found.final, found.pending)
    vouched, recorded, paid, final, pending = map(int, told)
    return vouched, recorded, paid, final, pending


def claim(ground: Ground, amount: int) -> None:
    site = ground.settler.site
    assert site.domain is not None
    job = site.job_key(JOB)
    said = Voucher(job=job, node=FIRST.node_id, sequence=1, amount=Wei(amount))
    signature = chain_form(sign(COORDINATOR, site.domain.separator(), said))
    fields = (word_bytes(job), address_bytes(FIRST.node_id), said.sequence, said.amount)
    ground.act_as(FIRST, site.calls.abi.call("redeemVoucher", fields, signature))


def test_pay_goes_from_tier_to_tier_and_says_when(ground: Ground) -> None:
    ground.opened()
    assert figures(ground) == (VOUCHED, 0, 0, 0, 0)

    ground.earn(0, range(1))
    ground.rest()
    assert figures(ground) == (VOUCHED, FOR_CERTAIN, 0, 0, 0)
    assert first(ground).due == [Due(str(FOR_CERTAIN), "epoch 0", None)]

    ground.end(0)
    ground.rest()
    (epoch,) = ground.epochs()
    ends_s = epoch.window_ends_s
    assert figures(ground) == (VOUCHED, SHARE, 0, 0, 0)
    assert first(ground).due == [Due(str(SHARE), "epoch 0", ends_s)]
    assert ends_s > pay_of(ground).time_s

    ground.settle()
    assert figures(ground) == (VOUCHED, SHARE, SHARE, SHARE, 0)
    assert first(ground).due == []


def test_a_claim_is_pending_and_not_paid_until_somebody_releases_it(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.rest()
    claim(ground, VOUCHED)
    assert figures(ground) == (VOUCHED, FOR_CERTAIN, 0, 0, VOUCHED)
    claimed_s = pay_of(ground).time_s
    # The share of the open epoch is in the claim already.
    assert first(ground).due == [Due(str(VOUCHED), CLAIM, claimed_s + PROFILE.window_s)]
    ground.let_pass(PROFILE.window_s + 1)
    ground.mine()
    assert figures(ground)[2:] == (0, 0, VOUCHED)
    job = word_bytes(ground.settler.site.job_key(JOB))
    release = ground.settler.site.calls.abi.call("releaseVoucher", job, FIRST.address)
    ground.act_as(FIRST, release)
    assert figures(ground)[2:] == (VOUCHED, VOUCHED, 0)


def test_a_job_that_the_ledger_does_not_know_has_no_tiers(ground: Ground) -> None:
    ground.opened()
    domain = ground.settler.site.domain
    assert domain is not None
    assert PayReader(ground.chain, domain).pay(JobKey("ab" * 32), {}, range(1)) is None
