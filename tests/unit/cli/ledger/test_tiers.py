"""How far a node's pay is, tier by tier, and when the rest is due."""

import pytest
from msgspec.structs import replace

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.account import TransactionView
from hypergpu.cli.ledger.showing import say_ledger
from hypergpu.cli.ledger.tiers.standing import (
    TIERS,
    Clock,
    Due,
    NodeTiers,
    PayView,
    ToldAccount,
    ToldEpoch,
    ToldShare,
    node_tiers,
)
from hypergpu.cli.ledger.tiers.table import due_at
from hypergpu.ledger.settlement.state import ShareState
from tests.unit.cli.ledger.test_verifying import VIEW
from tests.unit.node.test_wallet import NODE

NOW_S, WINDOW_S = 10_000, 100
CLOCK = Clock(NOW_S, WINDOW_S)
OLD = ToldEpoch(0, NOW_S - 500)
FRESH = ToldEpoch(1, NOW_S - 40)
OPEN = ToldEpoch(2, 0)


def share(epoch: ToldEpoch, state: ShareState, amount: int, *, paid: int = 0) -> ToldShare:
    """Of a job whose price is 1 for a score of 1,000."""
    reward = amount if epoch.closed_at_s else 0
    return ToldShare(epoch, state, 1_000 * amount, reward, paid)


def tiers(account: ToldAccount, *shares: ToldShare, vouched: int = 0) -> NodeTiers:
    return node_tiers(NODE.node_id, account, shares, unit_price=1_000, vouched=vouched, clock=CLOCK)


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
    found = tiers(ToldAccount(counted=3), share(FRESH, ShareState.DUE, 300), vouched=300)
    assert (found.vouched, found.recorded, found.paid, found.final) == ("300", "300", "0", "0")
    assert found.due == [Due("300", "epoch 1", FRESH.closed_at_s + WINDOW_S)]
    assert due_at(found, view_of(found)) == f"{moment(NOW_S + 60)} (epoch 1)"


def test_what_was_paid_against_stake_is_final_once_its_window_is_over() -> None:
    account = ToldAccount(counted=3, earned=800, paid=800)
    found = tiers(
        account,
        share(OLD, ShareState.PAID, 500, paid=500),
        share(FRESH, ShareState.PAID, 300, paid=300),
    )
    assert (found.recorded, found.paid, found.final, found.due) == ("800", "800", "500", [])


def test_an_open_epoch_is_recorded_and_its_time_is_not_known_yet() -> None:
    found = tiers(ToldAccount(counted=1), share(OPEN, ShareState.DUE, 40))
    assert (found.recorded, found.due) == ("40", [Due("40", "epoch 2", None)])
    assert due_at(found, view_of(found)) == f"{WINDOW_S} s after epoch 2 is closed"


def test_a_pending_claim_is_not_paid_and_later_shares_make_it_good() -> None:
    account = ToldAccount(counted=2, pending=250, release_at_s=NOW_S + 70)
    shares = (share(FRESH, ShareState.DUE, 200), share(OPEN, ShareState.DUE, 90))
    found = tiers(account, *shares, vouched=290)
    assert (found.paid, found.final, found.pending, found.recorded) == ("0", "0", "250", "290")
    assert found.due == [
        Due("40", "epoch 2", None),
        Due("250", "a voucher's claim", NOW_S + 70),
    ]
    assert sum(int(one.amount) for one in found.due) == 290
    assert due_at(found, view_of(found)) == (
        f"40 {WINDOW_S} s after epoch 2 is closed; 250 {moment(NOW_S + 70)} (a voucher's claim)"
    )


def test_what_was_voided_stays_recorded_and_is_neither_paid_nor_due() -> None:
    account = ToldAccount(counted=2, earned=100, paid=100, voided=300)
    void, paid = (
        share(FRESH, ShareState.VOID, 300),
        share(OLD, ShareState.PAID, 100, paid=100),
    )
    found = tiers(account, paid, void)
    assert (found.recorded, found.paid, found.final) == ("400", "100", "100")
    assert (found.voided, found.due) == ("300", [])


def test_once_the_window_is_over_anybody_may_have_a_share_paid() -> None:
    found = tiers(ToldAccount(counted=1), share(OLD, ShareState.DUE, 60))
    assert due_at(found, view_of(found)) == (
        f"since {moment(OLD.closed_at_s + WINDOW_S)}: anybody may have epoch 0 paid"
    )


def test_the_command_prints_the_tiers_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = tiers(ToldAccount(counted=3), share(FRESH, ShareState.DUE, 300), vouched=300)
    say_ledger(replace(VIEW, pay=view_of(found)), 0)
    *_, explained, titles, row = capsys.readouterr().out.splitlines()
    for name, meaning in TIERS.items():
        assert f"{name} {meaning}" in explained
    assert titles.split() == [
        *("NODE", "T0", "VOUCHED", "T1", "RECORDED", "T2", "PAID", "T3", "FINAL"),
        *("PENDING", "DUE", "DUE", "AT"),
    ]
    assert row.split()[1:7] == ["home", "300", "300", "0", "0", "0"]
    assert row.endswith(f"300  {moment(NOW_S + 60)} (epoch 1)")


def test_the_newest_transactions_are_listed_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [TransactionView(f"0x{n:064x}", f"batch/{n}", 0, "final", n) for n in range(300)]
    view = replace(VIEW, transactions=rows)
    say_ledger(view, 0)
    told = capsys.readouterr().out
    assert "and 280 older transactions: see --all" in told
    assert "batch/280 " in told
    assert "batch/279 " not in told
    say_ledger(view, 0, len(rows))
    told = capsys.readouterr().out
    assert "batch/0 " in told
    assert "--all" not in told
