"""What a ledger's accounts say is whole on every terminal, and in a pipe."""

import re
from contextlib import redirect_stdout
from io import StringIO

import pytest
from msgspec.structs import replace

from hypergpu.cli.ledger.account import LedgerView, NodeAccountView, TransactionView
from hypergpu.cli.ledger.showing import Listed, say_ledger
from hypergpu.cli.ledger.tiers.standing import TIERS, NodeTiers, PayView
from hypergpu.ids import NodeId
from tests.unit.cli.ledger.test_verifying import VIEW
from tests.unit.node.test_wallet import JOB

NAMES = ("home-fibre", "lte-moving", "home-dsl", "starlink", "a-machine-behind-seven-hills")
TITLES = (
    *("node", "name", "contributions", "quality", "earned", "paid", "paid by"),
    *("T0 vouched", "T1 recorded", "T2 paid", "T3 final", "due"),
)
PURPOSES = (
    f"mint/escrow/{JOB}/400000000",
    f"escrow/{JOB}/400000000",
    f"open/{JOB}",
    f"batch/{JOB}/0",
    f"close/{JOB}/0",
    f"pay/{JOB}/0/0",
    f"sweep/{JOB}/0",
)
HASHES = [f"0x{number:064x}" for number in range(1, len(PURPOSES) + 1)]
PAYER = HASHES[5][:4] + 60 * "b"
USUAL, LONG = "76160000", "7616" + 18 * "0"
"""Amounts of tokens with 6 and with 18 decimals."""


class Terminal(StringIO):
    """Somebody looks at it."""

    def isatty(self) -> bool:
        return True


def ledger(amount: str) -> LedgerView:
    """A job whose five nodes are paid so much each."""
    ids = [NodeId(f"0x{number:040x}") for number in range(len(NAMES))]
    accounts = [
        NodeAccountView(node, name, 11, 7_616, 10_000, amount, amount, amount, paid_by=PAYER)
        for node, name in zip(ids, NAMES, strict=True)
    ]
    tiers = [
        NodeTiers(
            id=node,
            vouched=amount,
            recorded=amount,
            receipts_recorded=11,
            paid=amount,
            final=amount,
            pending="0",
            voided="0",
            due=[],
        )
        for node in ids
    ]
    pay = PayView(
        chain_id=31_337,
        contract="0xc0",
        block=62,
        time_s=10_000,
        window_s=30,
        first_epoch=0,
        tiers=TIERS,
        nodes=tiers,
    )
    rows = [
        TransactionView(name, purpose, 0, "final", 20_000_000 + at)
        for at, (name, purpose) in enumerate(zip(HASHES, PURPOSES, strict=True))
    ]
    return replace(VIEW, spent=str(5 * int(amount)), nodes=accounts, transactions=rows, pay=pay)


def told(view: LedgerView, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of this width shows, without its colours."""
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with redirect_stdout(terminal):
        say_ledger(view, 6)
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("amount", [USUAL, LONG])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_terminal_cuts_no_title_no_amount_and_no_hash(
    width: int, amount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = told(ledger(amount), width, monkeypatch)
    for title in TITLES:
        assert re.search(rf"(?<!\S){title}(?!\S)", said), title
    assert [
        line for line in said.splitlines() if line.startswith("0x") and line in HASHES
    ] == HASHES
    assert len(re.findall(rf"(?<!\S){amount}(?!\S)", said)) == 5 * 6
    assert str(5 * int(amount)) in said
    assert len(re.findall(rf"(?<!\S){PAYER[:10]}(?!\S)", said)) == len(NAMES)
    assert "\u2026" not in said


@pytest.mark.parametrize("width", [80, 100, 120])
def test_usual_amounts_are_in_tables_no_wider_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = told(ledger(USUAL), width, monkeypatch).splitlines()
    (titles,) = [line for line in lines if line.startswith("node ") and "earned" in line]
    assert re.split(" {2,}", titles.strip()) == [*TITLES[:7]]
    tables = [line for line in lines if USUAL in line or line.startswith(("node", "total"))]
    assert max(len(line.rstrip()) for line in [*tables, *HASHES]) <= width


def test_a_long_name_is_folded_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = told(ledger(USUAL), 80, monkeypatch).splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("0x00000000  a-mach"))
    assert "".join(line[12:].split("  ")[0].strip() for line in lines[at : at + 3]) == NAMES[-1]


def test_a_pipe_gets_each_row_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say_ledger(ledger(USUAL), 6)
    lines = capsys.readouterr().out.splitlines()
    (titles,) = [line for line in lines if "CONTRIBUTIONS" in line]
    assert re.split(" {2,}", titles) == [title.upper() for title in TITLES[:7]]
    assert len([line for line in lines if line.endswith(f"  {PAYER[:10]}")]) == len(NAMES)
    (total,) = [line for line in lines if line.startswith("total")]
    assert total.split()[-2:] == [str(5 * int(USUAL))] * 2
    assert f"paid         {5 * int(USUAL)} (380.800000) by now" in lines
    assert set(HASHES) <= set(lines)


def test_each_transaction_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = TransactionView(HASHES[0], f"approve/escrow/{JOB}/5/9", 0, "waiting", 0)
    view = ledger(USUAL)
    say_ledger(replace(view, transactions=[*view.transactions, waiting], pay=None), 6)
    lines = capsys.readouterr().out.splitlines()
    said = [lines[at + 1] for at, line in enumerate(lines) if line in HASHES]
    assert said[2:6] == [
        "  final, block 20000002: opens the job",
        "  final, block 20000003: records batch 0",
        "  final, block 20000004: closes epoch 0",
        "  final, block 20000005: pays of epoch 0 what stake or window allows by now",
    ]
    assert said[-1] == f"  waiting: approve/escrow/{JOB}/5/9"


def test_the_newest_transactions_are_listed_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [TransactionView(f"0x{n:064x}", f"batch/{JOB}/{n}", 0, "final", n) for n in range(300)]
    view = replace(VIEW, transactions=rows)
    say_ledger(view, 0)
    said = capsys.readouterr().out
    assert f"and 280 older: hypergpu ledger show {JOB} --all\n" in said
    assert "records batch 280\n" in said
    assert "records batch 279\n" not in said
    say_ledger(view, 0, Listed(len(rows), ""))
    said = capsys.readouterr().out
    assert "records batch 0\n" in said
    assert "--all" not in said
    say_ledger(view, 0, Listed(6, "see demo-out/ledger.json"))
    said = capsys.readouterr().out
    assert "and 294 older: see demo-out/ledger.json\n" in said
    assert said.count("records batch") == 6
