"""The demo, on the numpy worker: quick enough for every run of the tests."""

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil

from tests.integration.cli.conftest import PROGRAM, home

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
}


def processes_in(folder: Path) -> list[int]:
    """Living processes that were told to use a path in ``folder``."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


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
    assert "receipts of 5 nodes are sound" in ended.stdout
    assert re.search(
        r"^paid against stake: 10 epochs, none of which waited", ended.stdout, re.MULTILINE
    )
    assert re.search(r"^diloco .* 1x  measured$", ended.stdout, re.MULTILINE)
    assert re.search(r"^sync .* extrapolated: 261 steps, ", ended.stdout, re.MULTILINE)
    assert re.search(r"^measured: .*home-cable killed", ended.stdout, re.MULTILINE)
    assert re.search(r"SIGKILL to home-cable .*\n(.*\n)*.*home-cable started again", ended.stdout)
    assert (out / "model" / "model.safetensors").exists()
    assert processes_in(tmp_path) == []


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
    assert demo.wait(90) == 130
    assert processes_in(tmp_path) == []
