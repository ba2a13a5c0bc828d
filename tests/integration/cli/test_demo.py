"""The demo, on the numpy worker: quick enough for every run of the tests."""

import json
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

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
    "transactions_epoch_least",
    "target",
    "to_target",
    "model_bytes",
    "runners",
    "back",
}
END = ["accuracy", "time", "money", "sync", "traffic", "work", "fault", "files"]


def run_demo(tmp_path: Path, *words: str) -> str:
    """What the demo prints."""
    ended = subprocess.run(
        [*PROGRAM, *SHORT, *words], capture_output=True, check=False, text=True, env=home(tmp_path)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def check_pay(out: Path) -> dict[str, Any]:
    """Everything that was earned is paid, by transactions in blocks; gives the summary."""
    summary, accounts = (
        json.loads((out / name).read_text("utf-8")) for name in ("summary.json", "ledger.json")
    )
    assert summary["receipts"] == summary["updates_accepted"]
    assert summary["paid"] == summary["earned"] == sum(int(n["earned"]) for n in accounts["nodes"])
    assert summary["paid"] > 0
    assert all(node["earned"] == node["paid"] for node in accounts["nodes"])
    in_blocks = [row for row in accounts["transactions"] if row["state"] in {"mined", "final"}]
    kinds = Counter(row["purpose"].split("/")[0] for row in in_blocks)
    assert kinds["batch"] == summary["transactions"]
    return dict(summary)


def test_demo_kills_a_node_and_still_learns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = run_demo(tmp_path, "--out", str(out))
    summary = check_pay(out)
    assert set(summary) == KEYS
    assert summary["accuracy"] >= 0.93
    assert (summary["rounds"], summary["nodes"], summary["strategy"]) == (30, 5, "diloco")
    assert summary["sync_ratio"] > 1
    assert summary["transactions"] > 0
    assert summary["back"][0] == "home-cable"
    assert 15 < summary["back"][1] <= 30
    end = said.rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in end] == END
    assert not re.search(r"[0-9a-f]{40}", "".join(end)), "hashes are in the files"
    assert re.search(r"SIGKILL to home-cable .*\n(.*\n)*.*home-cable started again", said)
    assert (out / "model" / "model.safetensors").exists()
    assert processes_left(tmp_path) == []


def test_fixed_demo_ends_with_the_same_model_over_any_network(tmp_path: Path) -> None:
    models = {
        run_demo(tmp_path, "--fixed", "--net", net, "--out", str(tmp_path / net)).splitlines()[-1]
        for net in ("none", "proxy")
    }
    (model,) = models
    assert re.fullmatch(r"model [0-9a-f]{64}", model)


def test_demo_meters_each_contribution_by_a_transaction_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_demo(tmp_path, "--metering", "each", "--net", "none", "--out", str(out))
    summary = check_pay(out)
    assert summary["receipts"] == summary["transactions"]
    assert summary["transactions_epoch_least"] == summary["transactions"] >= 100


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
