"""The demo, on the numpy worker: quick enough for every run of the tests."""

import json
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import PROGRAM, warm_home
from tests.processes import processes_in, processes_left

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
    "updates_rejected",
    "model_digest",
    "strategy",
    "sync_ratio",
    "receipts",
    "earned",
    "paid",
    "transactions",
    "epochs",
    "decimals",
    "target",
    "to_target",
    "model_bytes",
    "runners",
    "back",
}
END = ["accuracy", "time", "money", "sync", "traffic", "work", "fault", "files"]


def run_demo(tmp_path: Path, *words: str) -> str:
    """What the demo prints."""
    process = subprocess.run(
        [*PROGRAM, *SHORT, *words],
        capture_output=True,
        check=False,
        text=True,
        env=warm_home(tmp_path),
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def check_pay(said: str, out: Path) -> dict[str, Any]:
    """Every node is paid in full by transactions in blocks, and the pay verifies; the summary."""
    summary, ledger = (
        json.loads((out / name).read_text("utf-8")) for name in ("summary.json", "ledger.json")
    )
    assert said.index("$ hypergpu ledger show") < said.index("$ hypergpu ledger verify")
    nodes = ledger["nodes"]
    assert len(nodes) == 5
    assert all(node["paid"] == node["worth"] and int(node["worth"]) > 0 for node in nodes)
    assert sum(int(node["paid"]) for node in nodes) == summary["paid"] == summary["earned"]
    assert summary["receipts"] == summary["updates_accepted"]
    assert sum(int(node["receipts"]) for node in nodes) == summary["receipts"]
    kinds = Counter(each["purpose"].split("/")[0] for each in ledger["transactions"])
    assert kinds["open"] == 1
    assert {each["state"] for each in ledger["transactions"]} <= {"mined", "final"}
    return dict(summary)


# `.ci/run` runs this demo by itself, with the same checks at its end.
@pytest.mark.full
def test_demo_kills_a_node_and_still_learns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = run_demo(tmp_path, "--out", str(out))
    summary = check_pay(output, out)
    assert set(summary) == KEYS
    assert summary["accuracy"] >= 0.93
    assert (summary["rounds"], summary["nodes"], summary["strategy"]) == (30, 5, "diloco")
    assert summary["sync_ratio"] > 1
    assert summary["transactions"] > 0
    assert summary["back"][0] == "home-cable"
    assert 15 < summary["back"][1] <= 30
    end = output.rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in end] == END
    assert not re.search(r"[0-9a-f]{40}", "".join(end)), "hashes are in the files"
    assert re.search(r"SIGKILL to home-cable .*\n(.*\n)*.*home-cable started again", output)
    assert (out / "model" / "model.safetensors").exists()
    assert processes_left(tmp_path) == []


@pytest.mark.full
def test_fixed_demo_ends_with_the_same_model_over_any_network(tmp_path: Path) -> None:
    fixed_words = ["--fixed", "--nodes", "2"]
    models = {
        run_demo(tmp_path, *fixed_words, "--net", net, "--out", str(tmp_path / net)).splitlines()[
            -1
        ]
        for net in ("none", "proxy")
    }
    (model,) = models
    assert re.fullmatch(r"model [0-9a-f]{64}", model)


@pytest.mark.full
def test_demo_meters_each_contribution_by_a_transaction_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = run_demo(tmp_path, "--metering", "each", "--net", "none", "--out", str(out))
    summary = check_pay(output, out)
    assert summary["receipts"] == summary["transactions"]
    assert summary["transactions"] >= 100


def test_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    demo = subprocess.Popen(
        [*PROGRAM, *SHORT, "--nodes", "2", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=warm_home(tmp_path),
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
