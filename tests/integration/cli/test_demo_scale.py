"""The demo that loses its coordinator, with real services of this machine."""

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from hypergpu.command_line import program
from tests.integration.cli.conftest import home

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
DEMO = program(
    "benchmarks.ours.demo", "scale", "--fixed", "--short", "--worker", "numpy", "--nodes", "2"
)
GONE_WITHIN_S = 60


def test_the_model_is_the_undisturbed_one_and_every_update_is_paid_once(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    process = subprocess.run(
        [*DEMO, "--out", out],
        capture_output=True,
        check=False,
        text=True,
        env=home(tmp_path),
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.splitlines()
    assert lines[-1] == "VALID: the same model, no update counts twice, all receipts are paid"
    model_words = [
        line.split() for line in lines if re.match(r"(undisturbed|with loss) +model ", line)
    ]
    digests = [words[-1] for words in model_words]
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert re.search(r"SIGKILL to coordinator-1 .*; its folder is deleted", process.stdout)
    assert "60 receipts for 60 updates" in process.stdout
    assert not (tmp_path / "out" / "state" / "coordinator-1").exists()


def test_interrupted_it_leaves_no_process(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=home(tmp_path),
    )
    assert demo.stdout is not None
    demo_children: list[psutil.Process] = []
    with demo.stdout:
        for line in demo.stdout:
            if "after the kill" in line:
                demo_children = psutil.Process(demo.pid).children(recursive=True)
                demo.send_signal(signal.SIGINT)
    assert demo.wait(240) == 130
    assert len(demo_children) > 10
    _, alive = psutil.wait_procs(demo_children, timeout=GONE_WITHIN_S)
    assert alive == []
