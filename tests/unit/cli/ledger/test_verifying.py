"""What is wrong with a job's accounts is found from its receipts alone."""

import pytest
from msgspec.structs import replace

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.account import (
    LedgerView,
    NodeAccountView,
    columns,
    ledger_lines,
    rows,
    shown,
)
from hypergpu.cli.ledger.showing import say_ledger
from hypergpu.cli.ledger.verifying import Verification, audited, verdict_lines, verified
from hypergpu.ids import Address
from hypergpu.ledger.packing import totals_words
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.units import Wei
from tests.properties.ledger.test_audit import open_town, paid_town
from tests.properties.ledger.town import NODES, WINDOW_S, Action, done
from tests.unit.node.test_wallet import COORDINATOR, JOB, NODE, STRANGER, TERMS, receipt

RECEIPTS = [receipt(0), receipt(1), receipt(2)]
ACCOUNT = NodeAccountView(
    id=NODE.node_id,
    name="home",
    contributions=3,
    samples=300,
    quality_bps=9_000,
    earned="2700",
    vouched="2700",
    paid="2000",
)
"""A score of 2,700,000 at 1,000 each million."""
VIEW = LedgerView(
    job=JOB,
    key=TERMS.job,
    coordinator=TERMS.coordinator,
    chain_id=TERMS.domain.chain_id,
    contract=TERMS.domain.contract,
    unit_price="1000",
    escrow="3000",
    spent="2700",
    is_over=True,
    unmeasured_rounds=0,
    nodes=[ACCOUNT],
    transactions=[],
    chain=None,
)

SOUND = Verification(job=JOB, receipts=12, nodes=3, is_sound=True, faults=[])


def faults(receipts: list[SignedReceipt], view: LedgerView = VIEW) -> list[str]:
    found = verified(view, TERMS, receipts)
    assert found.is_sound == (not found.faults)
    return found.faults


def test_sound_receipts_and_the_accounts_that_follow_from_them_are_sound() -> None:
    found = verified(VIEW, TERMS, RECEIPTS)
    assert (found.is_sound, found.receipts, found.nodes) == (True, 3, 1)


def test_a_job_that_goes_on_while_it_is_read_is_sound() -> None:
    first = replace(VIEW, nodes=[replace(ACCOUNT, contributions=2, earned="1800", vouched="1800")])
    assert verified(first, TERMS, RECEIPTS, VIEW).faults == []
    later = replace(VIEW, nodes=[replace(ACCOUNT, contributions=9)])
    assert verified(first, TERMS, RECEIPTS, later).faults == []


def test_what_is_told_is_given_whether_a_job_goes_on_or_not() -> None:
    later = replace(VIEW, nodes=[replace(ACCOUNT, contributions=9)])
    (fault,) = verified(VIEW, TERMS, RECEIPTS[:2], later).faults[:1]
    assert fault == f"{ACCOUNT.id}: 3 receipts are told, 2 there"
    fewer = replace(VIEW, nodes=[replace(ACCOUNT, contributions=2, earned="1800")])
    assert verified(fewer, TERMS, RECEIPTS, fewer).faults == [
        f"{ACCOUNT.id}: 2 receipts are told, 3 there"
    ]


def test_a_missing_receipt_is_found() -> None:
    assert any("number 1 is missing" in fault for fault in faults([RECEIPTS[0], RECEIPTS[2]]))


def test_a_receipt_said_twice_is_found() -> None:
    told = faults([*RECEIPTS, RECEIPTS[2]])
    assert any("said twice" in fault for fault in told)
    assert any("has a receipt already" in fault for fault in told)


def test_a_forged_signature_is_found() -> None:
    forged = receipt(2, signer=STRANGER)
    (fault,) = faults([*RECEIPTS[:2], forged])
    assert fault.endswith(f"the coordinator {COORDINATOR.node_id} did not sign it")


def test_a_quality_that_was_altered_is_found() -> None:
    altered = replace(RECEIPTS[0], receipt=replace(RECEIPTS[0].receipt, quality_bps=10_000))
    assert any("did not sign it" in fault for fault in faults([altered, *RECEIPTS[1:]]))


@pytest.mark.parametrize("earned", ["2695", "2701"])
def test_pay_that_does_not_follow_is_found(earned: str) -> None:
    view = replace(VIEW, nodes=[replace(ACCOUNT, earned=earned, vouched=earned)])
    (fault,) = faults(RECEIPTS, view)
    assert f"it earned {earned} by the coordinator, 2700 by its receipts" in fault


def test_a_voucher_below_what_was_earned_is_found_once_the_job_is_over() -> None:
    view = replace(VIEW, nodes=[replace(ACCOUNT, vouched="2699")])
    (fault,) = faults(RECEIPTS, view)
    assert "its voucher of 2699 is less" in fault
    assert faults(RECEIPTS, replace(view, is_over=False)) == []


def test_more_pay_than_escrow_is_found() -> None:
    assert any(
        "more is earned than" in each for each in faults(RECEIPTS, replace(VIEW, escrow="9"))
    )


def test_terms_of_another_owner_are_found() -> None:
    other = replace(TERMS, coordinator=Address(STRANGER.node_id))
    assert any("is not that of" in fault for fault in verified(VIEW, other, RECEIPTS).faults)


def test_sums_that_the_root_does_not_bear_are_said_and_the_others_follow_from_the_receipts() -> (
    None
):
    town = paid_town()
    found = SOUND
    sound = audited(found, town.fact(), town.receipts)
    assert "2 batches, whose roots and sums are those of the receipts" in "".join(
        verdict_lines(sound)
    )
    fact = town.fact()
    first, *rest = fact.batches
    one, *others = first.totals()
    raised = totals_words([replace(one, samples=one.samples + 1), *others])
    tampered = replace(fact, batches=(replace(first, content=raised), *rest))
    told = audited(found, tampered, town.receipts)
    assert not told.is_sound
    assert told.faults[0] == (
        f"chain: batch: epoch 0: batch 0: its sums for {one.node} are {one.samples + 1} samples and"
        f" a score of {one.score}, the receipts under its root come to {one.samples} and"
        f" {one.score}"
    )


def test_what_is_open_is_told_with_node_epoch_and_time() -> None:
    town = open_town(Action("redeem", who=3, amount=1_000))
    due_s = town.ledger.state.epochs[town.fact().job, 0].closed_at_s + WINDOW_S
    told = verdict_lines(audited(SOUND, town.fact(), town.receipts))
    shares = [line for line in told if "a share of" in line]
    assert len(shares) == 3
    for node, line in zip(sorted(one.node_id for one in NODES), shares, strict=True):
        assert line.startswith(f"not yet: {node}, epoch 0: a share of ")
        assert line.endswith(f" is not paid yet; due at {moment(due_s)}")
    (claim,) = [line for line in told if "its voucher is claimed" in line]
    assert claim.endswith(f"pending, not paid; due at {moment(town.ledger.now_s + WINDOW_S)}")

    done(town, Action("wait", amount=WINDOW_S))
    late = verdict_lines(audited(SOUND, town.fact(), town.receipts))
    assert f"is not paid yet; since {moment(due_s)} anybody may have it paid" in late[2]


def test_a_fault_of_one_node_names_it_and_its_epoch() -> None:
    town = paid_town()
    first, *rest = town.fact().shares
    fact = replace(town.fact(), shares=(replace(first, paid=Wei(first.paid * 2)), *rest))
    told = audited(SOUND, fact, town.receipts).faults
    assert told[0] == (
        f"chain: pay: {first.node}, epoch {first.epoch}: {2 * first.paid} was paid for a share of"
        f" {first.reward}"
    )


def test_no_more_is_printed_than_people_read_and_json_has_all_of_it() -> None:
    found = replace(SOUND, open=[f"thing {number}" for number in range(50)])
    lines = verdict_lines(found)
    assert lines[-1] == "and 30 more of such: see --json"
    assert len(lines) == 22


def test_amounts_are_whole_numbers_with_their_decimals_beside_them() -> None:
    assert shown("1500000", 6) == "1500000 (1.500000)"
    assert shown("7", 6) == "7 (0.000007)"
    assert shown("7", 0) == shown("7", None) == "7"


@pytest.mark.parametrize(
    ("decimals", "token", "escrow"),
    [
        (6, "of 6 decimals; amounts", "3000 (0.003000)"),
        (18, "of 18 decimals; amounts", "3000 (0.000000000000003000)"),
        (1, "of 1 decimal; amounts", "3000 (300.0)"),
        (0, "of 0 decimals; amounts", "3000"),
        (None, "its decimals are not known, as no chain was asked", "3000"),
    ],
)
def test_amounts_stand_with_the_tokens_own_decimals(
    decimals: int | None, token: str, escrow: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_ledger(replace(VIEW, decimals=decimals))
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"token        {token}") for line in told)
    assert f"escrow       {escrow}" in told


def test_decimals_that_are_given_go_before_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    say_ledger(replace(VIEW, decimals=18), 2)
    told = capsys.readouterr().out.splitlines()
    assert "escrow       3000 (30.00)" in told
    assert any(line.startswith("token        of 2 decimals") for line in told)


def test_one_of_a_thing_is_told_as_one() -> None:
    first, second = verdict_lines(replace(SOUND, receipts=1, nodes=1, batches=1, block=7))
    assert first == "1 receipt of 1 node is sound, and so is the pay"
    assert second.startswith("the chain recorded them in 1 batch, whose roots")


def test_the_table_tells_each_nodes_mean_quality_and_pay() -> None:
    (row,) = rows(VIEW)
    assert row[1:] == ["home", "3", "90.0%", "2700", "2000", ""]
    assert [column.title for column in columns(VIEW)][-3:] == ["earned", "paid", "paid by"]
    payer = "0x0123456789abcdef"
    (row,) = rows(replace(VIEW, nodes=[replace(ACCOUNT, paid_by=payer)]))
    assert row[-1] == payer[:10]


def test_where_no_chain_was_asked_the_voucher_is_told_and_nothing_of_payments() -> None:
    unasked = replace(VIEW, nodes=[replace(ACCOUNT, paid=None, vouched="2800")])
    (row,) = rows(unasked)
    assert row[-2:] == ["2700", "2800"]
    assert [column.title for column in columns(unasked)][-2:] == ["earned", "voucher"]
    assert not any(line.startswith("paid ") for line in ledger_lines(unasked, 0))


def test_the_last_row_sums_up_several_nodes() -> None:
    other = replace(ACCOUNT, samples=100, quality_bps=5_000, earned="500", paid="0")
    *_, total = rows(replace(VIEW, nodes=[ACCOUNT, other]))
    assert total == ["total", "", "6", "80.0%", "3200", "2000", ""]


def test_a_job_that_pays_nothing_says_so() -> None:
    lines = ledger_lines(replace(VIEW, unit_price="0", chain_id=0), 6)
    assert lines[-1] == "pay          none: receipts alone"
    assert "no chain" in lines[0]
