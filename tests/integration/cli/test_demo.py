"""The demo, on the numpy worker: quick enough for every run of the tests."""

import json
import re
import signal
import subprocess
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from hypergpu.cli.demo.lines import PROFILES
from tests.integration.cli.conftest import PROGRAM, home
from tests.integration.cli.left import processes_in, processes_left

pytestmark = pytest.mark.timeout(1200)
SHORT = ["demo", "--short", "--worker", "numpy", "--nodes", "5"]
KEYS = {
    "accuracy",
    "rounds",
    "wall_s",
    "bytes_up",
    "bytes_down",
    "nodes",
    "updates_accepted",
    "updates_refused",
    "model_digest",
    "strategy",
    "sync_ratio",
    "receipts",
    "earned",
    "paid",
    "transactions",
    "transactions_epoch_least",
}


TRANSACTION = re.compile(r"^(0x[0-9a-f]{64})\n  \w+(?:, block \d+)?: \w+ \w+ \w+", re.MULTILINE)
"""Its hash, then its state, its block, and what it is for."""
TRANSACTIONS_TOLD = 6


def columns(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def table_under(said: str, *titles: str) -> list[dict[str, str]]:
    """The rows of a table of the end, by their columns' titles."""
    lines = iter(said.splitlines())
    names = next(found for line in lines if (found := columns(line))[: len(titles)] == [*titles])
    rows = list(iter(lambda: next(lines), ""))
    # A transaction that waits has no block.
    return [dict(zip_longest(names, columns(row), fillvalue="")) for row in rows]


def units(said: str, name: str) -> int:
    """Of the line of this name: an amount with its decimals behind it."""
    found = re.search(rf"^{name} +(\d+) \((\d+\.\d{{6}})\)", said, re.MULTILINE)
    assert found is not None, name
    assert int(found[1]) == int(found[2].replace(".", ""))
    return int(found[1])


def check_pay(said: str, out: Path) -> None:
    """The end says who has done what, and that it is paid by transactions in blocks."""
    summary, accounts = (
        json.loads((out / name).read_text("utf-8")) for name in ("summary.json", "ledger.json")
    )
    *nodes, _ = table_under(said, "NODE", "NAME")
    assert all(0 < float(node["QUALITY"].removesuffix("%")) <= 100 for node in nodes)
    assert all(node["EARNED"] == node["PAID"] for node in nodes)
    paid = [int(node["PAID"]) for node in nodes]
    assert min(paid) > 0
    assert sum(paid) == summary["paid"] == summary["earned"] == units(said, "spent")
    total = re.search(r"^total +(\d+) +[\d.]+% +(\d+) +(\d+)$", said, re.MULTILINE)
    assert total is not None
    assert [int(sum_) for sum_ in total.groups()] == [summary["receipts"], sum(paid), sum(paid)]
    assert units(said, "paid") == sum(paid)
    tiers = table_under(said, "NODE", "T0 VOUCHED")
    assert [int(node["T2 PAID"]) for node in tiers] == paid
    assert all(int(node["T0 VOUCHED"]) >= int(node["T1 RECORDED"]) for node in tiers)

    kinds = check_transactions(said, nodes, accounts, out)
    assert kinds["batch"] == summary["transactions"]
    count, batches = summary["receipts"], kinds["batch"]
    verdict = said.partition("$ hypergpu ledger verify\n")[2].splitlines()
    assert verdict[0] == f"{count} receipts of 5 nodes are sound, and so is the pay"
    assert verdict[1].startswith(f"the chain recorded them in {batches} batches, whose roots and")
    assert (
        f"contributions were recorded by {batches} transactions, at least"
        f" {summary['transactions_epoch_least']} an epoch"
    ) in verdict


def check_transactions(
    said: str, nodes: list[dict[str, str]], accounts: dict[str, Any], out: Path
) -> Counter[str]:
    """The newest are told, all are in the file, and each node's row names what paid it last."""
    transactions = accounts["transactions"]
    purposes = {row["hash"]: row["purpose"].split("/")[0] for row in transactions}
    assert len(purposes) == len(transactions)
    assert TRANSACTION.findall(said) == list(purposes)[-TRANSACTIONS_TOLD:]
    older = len(transactions) - TRANSACTIONS_TOLD
    assert f"\nand {older} older: see {out / 'ledger.json'}\n" in said
    payers = [node["paid_by"] for node in accounts["nodes"]]
    assert [node["PAID BY"] for node in nodes] == [payer[:10] for payer in payers]
    assert {purposes[payer] for payer in payers} == {"pay"}
    # Dust may still be on its way back into the escrow.
    paying = [row for row in transactions if not row["purpose"].startswith("sweep/")]
    assert all(row["state"] in {"mined", "final"} and row["block"] for row in paying)
    kinds = Counter(purposes.values())
    assert kinds["open"] == 1
    assert kinds["close"] == kinds["pay"] > 0
    return kinds


def test_demo_kills_a_node_and_still_learns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = subprocess.run(
        [*PROGRAM, *SHORT, "--out", str(out)],
        capture_output=True,
        check=False,
        text=True,
        env=home(tmp_path),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert set(summary) == KEYS
    assert summary["accuracy"] >= 0.93
    assert (summary["rounds"], summary["nodes"], summary["strategy"]) == (30, 5, "diloco")
    assert summary["sync_ratio"] > 1
    assert summary["receipts"] == summary["updates_accepted"]
    assert summary["paid"] == summary["earned"] > 0
    check_pay(ended.stdout, out)
    *rows, _ = table_under(ended.stdout, "NODE", "NAME")
    assert {row["NAME"] for row in rows} == set(PROFILES)
    assert "is not known" not in ended.stdout + ended.stderr
    assert summary["transactions"] >= 10
    assert re.search(
        r"^paid against stake: 10 epochs, none of which waited", ended.stdout, re.MULTILINE
    )
    assert re.search(r"^diloco .* 1x  measured$", ended.stdout, re.MULTILINE)
    assert re.search(r"^sync .* extrapolated: 261 steps, ", ended.stdout, re.MULTILINE)
    assert re.search(r"^measured: .*home-cable killed", ended.stdout, re.MULTILINE)
    assert re.search(r"SIGKILL to home-cable .*\n(.*\n)*.*home-cable started again", ended.stdout)
    assert (out / "model" / "model.safetensors").exists()
    assert processes_left(tmp_path) == []


def test_demo_meters_each_contribution_by_a_transaction_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = subprocess.run(
        [*PROGRAM, *SHORT, "--metering", "each", "--net", "none", "--out", str(out)],
        capture_output=True,
        check=False,
        text=True,
        env=home(tmp_path),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["receipts"] == summary["transactions"] == summary["updates_accepted"]
    assert summary["transactions_epoch_least"] == summary["transactions"] >= 100
    check_pay(ended.stdout, out)


def test_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = subprocess.Popen(
        [*PROGRAM, *SHORT, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=home(tmp_path),
    )
    assert demo.stdout is not None
    with demo.stdout:
        for line in demo.stdout:
            if "joined" in line:
                break
        assert len(processes_in(tmp_path)) > 3
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()
    assert demo.wait(240) == 130
    assert processes_left(tmp_path) == []
