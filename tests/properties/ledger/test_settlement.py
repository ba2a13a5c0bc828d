"""The model of the contract: money is neither made nor lost, whatever anybody does."""

import copy

import pytest
from hypothesis import given, settings

from hypergpu.ids import NodeId
from hypergpu.ledger.settlement.state import LEDGER, RevertedError, ShareState
from hypergpu.ledger.typed import Domain, Voucher
from hypergpu.units import Wei
from tests.properties.ledger.lives import Reached, histories, reached
from tests.properties.ledger.town import (
    ESCROW,
    JOB,
    NODES,
    PEOPLE,
    PURSE,
    TREASURY,
    WINDOW_S,
    Action,
    Town,
    done,
)

START_S = 1_800_000_000


def lived(history: list[Action]) -> Town:
    town = Town(START_S, Domain(chain_id=31337))
    for action in history:
        try:
            done(town, action)
        except RevertedError:
            continue
    return town


def reserved(town: Town) -> int:
    """What closed epochs hold for shares that are not settled, with the dust."""
    state = town.ledger.state
    held = 0
    for (job, number), epoch in state.epochs.items():
        shares = [(key[2], one) for key, one in state.shares.items() if key[:2] == (job, number)]
        rewards = {node: town.ledger.reward(job, number, node) for node, _ in shares}
        settled = {ShareState.PAID, ShareState.VOID}
        held += epoch.pool - sum(rewards[node] for node, one in shares if one.state in settled)
        held -= (epoch.pool - sum(rewards.values())) if epoch.is_swept else 0
    return held


@given(history=histories)
@settings(max_examples=200)
def test_what_the_ledger_holds_is_what_it_owes(history: list[Action]) -> None:
    town = lived(history)
    state = town.ledger.state
    stakes = sum(stake.staked + stake.unbonding for stake in state.stakes.values())
    bonds = sum(bond.amount for bond in state.bonds.values())
    pending = sum(account.pending for account in state.accounts.values())
    free = state.jobs[JOB].free
    assert state.balances[LEDGER] == stakes + bonds + free + reserved(town) + pending
    assert sum(state.balances.values()) == PURSE * len(PEOPLE)
    assert all(balance >= 0 for balance in state.balances.values())
    assert all(stake.free >= 0 <= min(stake.recent, stake.older) for stake in state.stakes.values())
    assert all(one.advance >= 0 <= one.pending for one in state.accounts.values())


@given(history=histories)
def test_what_was_put_in_is_free_taken_back_reserved_or_paid(history: list[Action]) -> None:
    town = lived(history)
    accounts = town.ledger.state.accounts.values()
    paid = sum(account.earned + account.advance for account in accounts)
    free = town.ledger.state.jobs[JOB].free
    assert town.deposited == free + town.reclaimed + reserved(town) + paid
    assert town.deposited >= ESCROW


@given(history=histories)
def test_every_share_is_paid_once_however_often_it_is_asked_for(history: list[Action]) -> None:
    town = lived(history)
    ledger = town.ledger
    ledger.state.is_paused = False
    ledger.now_s += WINDOW_S
    payees = [node.address for node in NODES]
    for number in range(3):
        if ledger.epoch(JOB, number).closed_at_s:
            ledger.distribute_payments(JOB, number, payees)
            before = dict(ledger.state.balances)
            assert ledger.distribute_payments(JOB, number, payees + payees) == 0
            assert ledger.state.balances == before


def test_most_histories_get_to_shares_that_are_rounded_and_paid() -> None:
    ends: list[Reached] = []

    @given(history=histories)
    @settings(max_examples=200, derandomize=True, database=None)
    def live(history: list[Action]) -> None:
        ends.append(reached(lived(history)))

    live()
    for name in Reached._fields:
        assert sum(getattr(end, name) > 0 for end in ends) > len(ends) / 2, name


def test_a_whole_life() -> None:
    town = Town(START_S, Domain(chain_id=31337))
    ledger, nodes = town.ledger, [node.address for node in NODES]
    for amount in (1_000, 2_000, 3_001):
        for number in range(3):
            done(town, Action("work", who=number, epoch=0, amount=amount + number))
    done(town, Action("aggregate", epoch=0, amount=1))
    pool = done(town, Action("close", who=0, epoch=0))
    rewards = [ledger.reward(JOB, 0, node) for node in nodes]
    # The two with stake are paid at once, the third after the window.
    assert ledger.distribute_payments(JOB, 0, nodes) == sum(rewards[:2])
    ledger.now_s += WINDOW_S
    assert ledger.distribute_payments(JOB, 0, nodes) == rewards[2]
    dust = ledger.sweep_dust(JOB, 0, nodes)
    assert pool == sum(rewards) + dust
    assert ledger.job(JOB).free == ESCROW - sum(rewards)


def test_a_token_that_refuses_a_payee_makes_it_credit() -> None:
    town = Town(START_S, Domain(chain_id=31337))
    ledger, poor = town.ledger, NODES[2].address
    done(town, Action("work", who=2, amount=3_000))
    done(town, Action("packed", amount=1))
    pool = ledger.close_epoch(PEOPLE[0].address, JOB, 0)
    ledger.now_s += WINDOW_S
    ledger.state.refusing.add(poor)
    assert ledger.distribute_payments(JOB, 0, [poor]) == pool > 0
    assert ledger.state.credit[poor] == pool
    ledger.state.refusing.clear()
    assert ledger.withdraw(poor, poor) == pool
    assert ledger.state.balances[poor] == PURSE + pool


def test_what_shares_made_good_of_a_claim_is_paid_also_when_arbiters_stop_it() -> None:
    town = Town(START_S, Domain(chain_id=31337))
    ledger, poor = town.ledger, NODES[2].address
    done(town, Action("work", who=2, amount=3_000))
    done(town, Action("packed", amount=1))
    pool = ledger.close_epoch(PEOPLE[0].address, JOB, 0)
    claim = Voucher(job=JOB, node=NodeId(poor), sequence=1, amount=Wei(pool + 500))
    assert ledger.redeem_voucher(poor, claim) == pool + 500
    assert ledger.distribute_payments(JOB, 0, [poor]) == 0
    assert ledger.void_voucher(JOB, poor) == 500
    ledger.now_s += WINDOW_S
    ledger.release_voucher(JOB, poor)
    assert ledger.state.balances[poor] == PURSE + pool
    assert ledger.job(JOB).free == ESCROW - pool


def test_a_call_that_reverts_leaves_no_trace() -> None:
    town = Town(START_S, Domain(chain_id=31337))
    before = copy.deepcopy(town.ledger.state)
    with pytest.raises(RevertedError, match="ERC20InsufficientBalance"):
        town.ledger.fund(TREASURY.address, JOB, 1)
    assert town.ledger.state == before
    assert town.ledger.job(JOB).free == ESCROW
