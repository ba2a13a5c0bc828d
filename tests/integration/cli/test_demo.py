"""The demo, on the numpy worker: quick enough for every run of the tests."""

import json
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

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
    "epochs",
}


def check_pay(said: str, out: Path) -> None:
    """Every node is paid in full by transactions in blocks, and the pay was verified."""
    summary, ledger = (
        json.loads((out / name).read_text("utf-8")) for name in ("summary.json", "ledger.json")
    )
    assert said.index("$ hypergpu ledger show") < said.index("$ hypergpu ledger verify")
    nodes = ledger["nodes"]
    assert len(nodes) == 5
    assert all(node["paid"] == node["worth"] and int(node["worth"]) > 0 for node in nodes)
    assert sum(int(node["paid"]) for node in nodes) == summary["paid"] == summary["earned"]
    assert sum(int(node["receipts"]) for node in nodes) == summary["receipts"]
    kinds = Counter(each["purpose"].split("/")[0] for each in ledger["transactions"])
    assert kinds["open"] == 1
    assert {each["state"] for each in ledger["transactions"]} <= {"mined", "final"}
    assert f"contributions were recorded by {summary['transactions']} transaction" in said


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
    assert summary["epochs"] == 10
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
    assert summary["transactions"] >= 100
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
