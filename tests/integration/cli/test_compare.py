"""`hypergpu compare` on real programs: two nodes, the numpy worker, a few rounds over proxies."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import PROGRAM, warm_home
from tests.processes import processes_left

MANUAL = (Path(__file__).parents[3] / "docs" / "compare.md").read_text("utf-8")
WORLD = """
[[nodes]]
name = "attic"
profile = "home-fibre"
[[nodes]]
name = "cellar"
profile = "home-cable"
"""
JOB = """
workload = "digits-softmax"
[training]
rounds = 12
inner_steps = 5
nodes = 2
[inner]
learning_rate = 0.01
[evaluation]
every = 2
target = 0.7
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "homes.toml").write_text(WORLD, "utf-8")
    (tmp_path / "job.toml").write_text(JOB, "utf-8")
    return tmp_path


def command(files: Path, *words: str) -> list[str]:
    file_words = ["compare", str(files / "job.toml"), "--world", str(files / "homes.toml")]
    option_words = ["--out", str(files / "out"), "--seeds", "1", "--worker", "numpy"]
    return [*PROGRAM, *file_words, *option_words, "--sync-steps", "3", *words]


def run_compare(files: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(files, *words), capture_output=True, check=False, text=True, env=warm_home(files)
    )


def standing(found: dict[str, Any], name: str) -> dict[str, Any]:
    (only,) = [each for each in found["strategies"] if each["strategy"] == name]
    assert isinstance(only, dict)
    return only


def be_short_of_its_target(files: Path) -> None:
    """Change the job into one that ends before."""
    text = (files / "job.toml").read_text("utf-8").replace("rounds = 12", "rounds = 2")
    (files / "job.toml").write_text(text.replace("0.7", "0.999"), "utf-8")


def test_a_target_that_is_never_reached_is_said_and_not_tried_again(files: Path) -> None:
    be_short_of_its_target(files)
    for is_kept in (False, True):
        process = run_compare(files, "--strategies", "diloco")
        assert process.returncode == 1
        assert "diloco, seed 1: never reached accuracy 0.999" in process.stdout
        (line,) = process.stderr.splitlines()
        assert line.startswith("[1/1] diloco-1: ")
        assert line.endswith("(kept)") is is_kept


@pytest.mark.full
def test_a_job_is_compared_and_what_is_finished_is_not_run_again(files: Path) -> None:
    half = run_compare(files, "--strategies", "diloco")
    assert "[1/1] diloco-1: " in half.stderr
    process = run_compare(files, "--strategies", "sync,diloco", "--json")
    comparison = json.loads(process.stdout)
    # Links that were late are a matter of the machine, and told.
    is_valid = all(each["is_valid"] for each in comparison["outcomes"])
    assert process.returncode == (0 if is_valid else 1), process.stderr
    lines = process.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "[1/3] sync-1-lan",
        "[2/3] sync-1-steps",
        "[3/3] diloco-1",
    ]
    assert [line.endswith("(kept)") for line in lines] == [False, False, True]
    assert comparison["schema"] == "hypergpu/compare/1"
    sync, diloco = standing(comparison, "sync"), standing(comparison, "diloco")
    assert (sync["how"], diloco["how"], comparison["baseline"]) == (
        "extrapolated",
        "measured",
        "sync",
    )
    # Of so short a job a busy machine has the greater part.
    faster = sync["time_ms"]["median"] / diloco["time_ms"]["median"]
    assert diloco["times_faster"] == pytest.approx(faster)
    assert diloco["times_fewer_bytes"] > 1
    assert json.loads((files / "out" / "compare.json").read_text("utf-8")) == comparison
    (for_page,) = (files / "data" / "hypergpu" / "comparisons").iterdir()
    assert json.loads(for_page.read_text("utf-8")) == comparison
    assert "<svg" in (files / "out" / "compare.svg").read_text("utf-8")
    # A changed job is another run; this one's target is never reached.
    be_short_of_its_target(files)
    again = run_compare(files, "--strategies", "diloco")
    assert "(kept)" not in again.stderr
    assert again.returncode == 1
    assert "not reached" in again.stdout
    assert "diloco, seed 1: never reached accuracy 0.999" in again.stdout


@pytest.mark.full
def test_the_manuals_example_runs(tmp_path: Path) -> None:
    job, world = re.findall(r"^```toml\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^```sh\nhypergpu (.*)\n```", MANUAL, re.MULTILINE)
    (tmp_path / "job.toml").write_text(job, "utf-8")
    (tmp_path / "homes.toml").write_text(world, "utf-8")
    # Shorter than it stands there, on machines without torch too: of an option the last one counts.
    shorter = ["--seeds", "1", "--sync-steps", "2", "--worker", "numpy"]
    process = subprocess.run(
        [*PROGRAM, *line.split(), *shorter],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        env=warm_home(tmp_path),
    )
    assert "[4/4] aware-1: " in process.stderr
    assert "written: compare-out/compare.json, compare-out/compare.svg" in process.stdout
    assert "not reached" not in process.stdout


def test_an_interrupted_comparison_leaves_no_program_and_says_what_is_kept(files: Path) -> None:
    text = (files / "job.toml").read_text("utf-8").replace("rounds = 12", "rounds = 100000")
    (files / "job.toml").write_text(text, "utf-8")
    child = subprocess.Popen(
        command(files, "--strategies", "diloco", "--target", "0.9999"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=warm_home(files),
    )
    assert child.stderr is not None
    with child.stderr:
        while child.stderr.read(1) != ":":
            pass
        os.kill(child.pid, signal.SIGINT)
        rest = child.stderr.read()
    assert child.wait(240) == 130
    assert "the same command goes on from there" in rest
    assert processes_left(files) == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--strategies", "diloco", "--target", "0"], 2, "--target 0.97"),
        (["--strategies", "diloco", "--target", "7"], 16, "an accuracy is never above 1"),
        (["--worker", "jax"], 16, 'error 6010: there is no worker "jax"'),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(
    files: Path, words: list[str], status: int, said: str
) -> None:
    process = run_compare(files, *words)
    assert (process.returncode, process.stdout) == (status, "")
    assert said in process.stderr
    assert not list((files / "out").glob("runs/*/logs"))
