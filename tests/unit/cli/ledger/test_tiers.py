"""How far a node's pay is, tier by tier, and when the rest is due."""

import msgspec
import pytest
from msgspec.structs import replace

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.showing import say_ledger
from hypergpu.cli.ledger.tiers.standing import (
    TIERS,
    Clock,
    Due,
    NodeTiers,
    PayView,
    node_tiers,
)
from hypergpu.cli.ledger.tiers.table import due_of
from hypergpu.ledger.audit.facts import AccountFact, ShareFact
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.units import Wei
from tests.unit.cli.ledger.test_verifying import VIEW
from tests.unit.node.test_wallet import NODE

NOW_S, WINDOW_S = 10_000, 100
CLOCK = Clock(NOW_S, WINDOW_S)
OLD, FRESH, OPEN = range(3)
CLOSED = {OLD: NOW_S - 500, FRESH: NOW_S - 40, OPEN: 0}


def share(epoch: int, state: ShareState, amount: int, *, paid: int = 0) -> ShareFact:
    """Of a job whose price is 1 for a score of 1,000."""
    return ShareFact(
        epoch=epoch,
        node=NODE.node_id,
        state=state,
        score=1_000 * amount,
        reward=Wei(amount if CLOSED[epoch] else 0),
        paid=Wei(paid),
    )


def account(counted: int, **amounts: int) -> AccountFact:
    known = {"earned": 0, "paid": 0} | amounts
    return msgspec.convert({"node": NODE.node_id, "counted": counted, **known}, AccountFact)


def tiers(of_node: AccountFact, *shares: ShareFact, vouched: int = 0) -> NodeTiers:
    return node_tiers(of_node, shares, CLOSED, unit_price=1_000, vouched=vouched, clock=CLOCK)


def told_due(of_node: NodeTiers) -> list[str]:
    return list(due_of(of_node, view_of(of_node)))


def view_of(*nodes: NodeTiers) -> PayView:
    return PayView(
        chain_id=1,
        contract="0xc0",
        block=7,
        time_s=NOW_S,
        window_s=WINDOW_S,
        first_epoch=0,
        tiers=TIERS,
        nodes=list(nodes),
    )


def test_a_node_without_stake_is_told_when_its_window_ends() -> None:
    found = tiers(account(3), share(FRESH, ShareState.DUE, 300), vouched=300)
    assert (found.vouched, found.recorded, found.paid, found.final) == ("300", "300", "0", "0")
    assert found.due == [Due("300", "epoch 1", CLOSED[FRESH] + WINDOW_S)]
    assert told_due(found) == [f"300 of epoch 1: due at {moment(NOW_S + 60)}"]


def test_what_was_paid_against_stake_is_final_once_its_window_is_over() -> None:
    held = account(3, earned=800, paid=800)
    found = tiers(
        held,
        share(OLD, ShareState.PAID, 500, paid=500),
        share(FRESH, ShareState.PAID, 300, paid=300),
    )
    assert (found.recorded, found.paid, found.final, found.due) == ("800", "800", "500", [])


def test_an_open_epoch_is_recorded_and_its_time_is_not_known_yet() -> None:
    found = tiers(account(1), share(OPEN, ShareState.DUE, 40))
    # A unit less than its score is worth: its pool and its share are still to be rounded down.
    assert (found.recorded, found.due) == ("39", [Due("39", "epoch 2", None)])
    assert told_due(found) == [f"39 of epoch 2: due {WINDOW_S} s after it is closed"]


def test_a_pending_claim_is_not_paid_and_later_shares_make_it_good() -> None:
    held = account(2, pending=250, release_at_s=NOW_S + 70)
    shares = (share(FRESH, ShareState.DUE, 200), share(OPEN, ShareState.DUE, 90))
    found = tiers(held, *shares, vouched=290)
    assert (found.paid, found.final, found.pending, found.recorded) == ("0", "0", "250", "289")
    assert found.due == [
        Due("39", "epoch 2", None),
        Due("250", "a voucher's claim", NOW_S + 70),
    ]
    assert sum(int(one.amount) for one in found.due) == 289
    assert told_due(found) == [
        f"39 of epoch 2: due {WINDOW_S} s after it is closed",
        f"250 of a voucher's claim: due at {moment(NOW_S + 70)}",
    ]


def test_what_was_voided_stays_recorded_and_is_neither_paid_nor_due() -> None:
    held = account(2, earned=100, paid=100, voided=300)
    void, paid = (
        share(FRESH, ShareState.VOID, 300),
        share(OLD, ShareState.PAID, 100, paid=100),
    )
    found = tiers(held, paid, void)
    assert (found.recorded, found.paid, found.final) == ("400", "100", "100")
    assert (found.voided, found.due) == ("300", [])


def test_once_the_window_is_over_anybody_may_have_a_share_paid() -> None:
    found = tiers(account(1), share(OLD, ShareState.DUE, 60))
    since = moment(CLOSED[OLD] + WINDOW_S)
    assert told_due(found) == [f"60 of epoch 0: anybody may have it paid, since {since}"]


def test_epochs_that_wait_for_the_same_are_told_together() -> None:
    due = [Due("10", f"epoch {number}", NOW_S - 50 + number) for number in range(100)]
    (ready, waiting) = told_due(replace(tiers(account(0)), due=due))
    assert (
        ready == f"510 of epoch 0 and 50 more: anybody may have it paid, since {moment(NOW_S - 50)}"
    )
    when = f"{moment(NOW_S + 1)} to {moment(NOW_S + 49)}"
    assert waiting == f"490 of epoch 51 and 48 more: due at {when}"


def test_the_command_prints_the_tiers_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = tiers(account(3), share(FRESH, ShareState.DUE, 300), vouched=300)
    say_ledger(replace(VIEW, pay=view_of(found)), 0)
    *explained, titles, row, due = capsys.readouterr().out.splitlines()
    for name, meaning in TIERS.items():
        assert f"{name} {meaning}" in explained
    assert titles.split() == [
        *("NODE", "T0", "VOUCHED", "T1", "RECORDED", "T2", "PAID", "T3", "FINAL", "DUE")
    ]
    assert row.split()[1:] == ["300", "300", "0", "0", "300"]
    assert due == f"{found.id[:10]}: 300 of epoch 1: due at {moment(NOW_S + 60)}"
