"""Sums of pay: nothing is paid that is not there, and nobody is promised what he will not get."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.ids import JobKey, NodeId
from hypergpu.ledger import pay
from hypergpu.ledger.typed import Domain, Voucher, sign
from hypergpu.ledger.voucher import (
    RECEIPTS_MOST,
    SignedVoucher,
    next_amount,
    no_voucher,
    voucher_fault,
)
from hypergpu.signature import IdentityKey
from hypergpu.units import BasisPoints, Samples, Wei
from tests.properties.ledger.statements import keys, vouchers

prices = st.integers(0, 10**24).map(Wei)
amounts = st.integers(0, 10**30).map(Wei)
own_scores = st.lists(st.integers(0, 10**12), min_size=1, max_size=20)


def named(values: list[int]) -> dict[NodeId, int]:
    return {NodeId(f"0x{number:040x}"): value for number, value in enumerate(values)}


@given(price=prices, values=own_scores, free=amounts)
def test_rewards_are_the_pool_but_for_less_than_a_unit_a_node(
    price: Wei, values: list[int], free: Wei
) -> None:
    pool = pay.pool(price, sum(values), free)
    rewards = pay.rewards(pool, named(values))
    assert pool <= free
    dust = pool - sum(rewards.values())
    assert dust == 0 or 0 < dust < len(values) or sum(values) == 0


@given(price=prices, values=own_scores)
def test_what_is_promised_while_an_epoch_is_open_is_earned_in_the_end(
    price: Wei, values: list[int]
) -> None:
    ample = Wei(price * sum(values))
    rewards = pay.rewards(pay.pool(price, sum(values), ample), named(values))
    for node, own in named(values).items():
        exact = Fraction(price * own, pay.PRICED_SCORE)
        promised = pay.earned_at_least(price, own)
        assert promised <= rewards[node] <= exact
        assert exact - promised < 2


@given(price=prices, samples=st.integers(0, 10**9).map(Samples), bps=st.integers(0, 10_000))
def test_work_never_earns_more_than_it_was_said_to_cost(
    price: Wei, samples: Samples, bps: int
) -> None:
    score = pay.score(samples, BasisPoints(bps))
    assert pay.pool(price, score, Wei(2**128)) <= pay.cost_at_most(price, samples)
    assert pay.guaranteed(price, samples, BasisPoints(bps)) <= pay.cost_at_most(price, samples)


@given(more=st.integers(0, 10_000), values=own_scores)
def test_a_higher_score_never_earns_less(more: int, values: list[int]) -> None:
    price, ample = Wei(7_919), Wei(2**128)
    higher = [values[0] + more, *values[1:]]
    before = pay.rewards(pay.pool(price, sum(values), ample), named(values))
    after = pay.rewards(pay.pool(price, sum(higher), ample), named(higher))
    first = NodeId(f"0x{0:040x}")
    # Both roundings together can cost it one unit.
    assert after[first] >= before[first] - 1


def test_an_epoch_that_nobody_scored_in_pays_nothing() -> None:
    assert pay.pool(Wei(5), 0, Wei(100)) == 0
    assert pay.reward(Wei(0), 0, 0) == 0


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=20))
def test_a_voucher_never_falls_and_holds_all_that_was_earned(
    steps: list[tuple[Wei, Wei]],
) -> None:
    held, earned = Wei(0), Wei(0)
    for more, advanced in steps:
        earned = Wei(earned + more)
        amount = next_amount(held, earned, advanced)
        assert amount >= held
        assert amount >= earned + advanced
        held = amount


def test_worthless_updates_are_advanced_once() -> None:
    held = Wei(0)
    for _ in range(100):
        held = next_amount(held, Wei(0), Wei(10))
        held = next_amount(held, Wei(0), Wei(0))
    assert held == 10


@given(voucher=vouchers, sequence=st.integers(0, RECEIPTS_MOST), key=keys, other=keys)
def test_a_node_takes_no_voucher_but_its_coordinators(
    voucher: Voucher, sequence: int, key: IdentityKey, other: IdentityKey
) -> None:
    voucher, separator = replace(voucher, sequence=sequence), Domain().separator()
    held = no_voucher(voucher.job, voucher.node)
    signed = SignedVoucher(voucher, sign(key, separator, voucher))

    def fault(signed: SignedVoucher, signer: IdentityKey, held: Voucher = held) -> str:
        return voucher_fault(signed, separator=separator, coordinator=signer.address, held=held)

    assert fault(signed, key) == ""
    assert fault(signed, key, voucher) == ""
    if other.node_id != key.node_id:
        assert "did not sign" in fault(signed, other)
    richer = Voucher(
        job=voucher.job, node=voucher.node, sequence=voucher.sequence, amount=Wei(2**128)
    )
    assert "less than" in fault(signed, key, richer)
    beyond = replace(voucher, sequence=RECEIPTS_MOST + 1)
    assert "at most" in fault(SignedVoucher(beyond, sign(key, separator, beyond)), key)
    assert "another job" in fault(signed, key, no_voucher(JobKey("ab" * 32), voucher.node))


@pytest.mark.parametrize(("round_", "epoch"), [(0, 0), (9, 0), (10, 1), (25, 2)])
def test_epochs_are_counts_of_rounds(round_: int, epoch: int) -> None:
    assert pay.epoch_of(round_, 10) == epoch
