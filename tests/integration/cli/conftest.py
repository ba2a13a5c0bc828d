"""A real coordinator started by `hypergpu up`, in a home of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm_workers import warm_variables

Ended = subprocess.CompletedProcess[str]
Run = Callable[..., Ended]
PROGRAM = [sys.executable, "-m", "hypergpu.user.cli"]
END_WITHIN_S = 240
JOIN = "hypergpu join "


def home(folder: Path) -> dict[str, str]:
    """The environment of a person without any settings of ours."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("HYPERGPU_")
    }
    return {
        **variables,
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
    }


def warm_home(folder: Path) -> dict[str, str]:
    """The same, with workers and evaluators that are forks of processes which have their imports:
    what a job does, and not how it starts, is the subject.
    """
    return {**home(folder), **warm_variables()}


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """A command that goes on in the background; its errors go to a file."""
    with (folder / f"{words[0]}.err").open("a", encoding="utf-8") as errors:
        return subprocess.Popen(
            [*PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=home(folder),
        )


def end_and_wait(child: subprocess.Popen[str]) -> int:
    """Ask a command to end and wait for it."""
    child.send_signal(signal.SIGTERM)
    status = child.wait(END_WITHIN_S)
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()
    return status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def join_line(folder: Path) -> Iterator[str]:
    """What `hypergpu up` tells people to paste."""
    where = [
        "--listen",
        "127.0.0.1",
        "--port",
        "0",
        "--node-port",
        "0",
        "--bulk-port",
        "0",
        "--no-page",
    ]
    up = start(["up", *where], folder)
    assert up.stdout is not None
    line = ""
    for line in up.stdout:
        if line.strip().startswith(JOIN):
            break
    yield line.strip()
    assert end_and_wait(up) == 0


@pytest.fixture(scope="module")
def nodes(folder: Path, join_line: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two nodes that pasted it."""
    token = join_line.rsplit(maxsplit=1)[-1]
    children = []
    for number in (1, 2):
        words = ["join", "-", "--worker", "numpy", "--state-dir", str(folder / f"node-{number}")]
        child = start([*words, "--name", f"machine-{number}"], folder)
        assert child.stdin is not None
        child.stdin.write(token + "\n")
        child.stdin.close()
        children.append(child)
    yield children
    assert [end_and_wait(child) for child in children] == [0, 0]


@pytest.fixture(scope="module")
def hypergpu(folder: Path, join_line: str) -> Run:
    """Any other command, on the machine of the coordinator."""
    assert join_line.startswith(f"{JOIN}hgpu1.")

    def run(*words: str) -> Ended:
        return subprocess.run(
            [*PROGRAM, *words],
            capture_output=True,
            check=False,
            text=True,
            timeout=240,
            env=home(folder),
            cwd=folder,
        )

    return run


JOB_FILE = """
workload = "digits-softmax"
name = "{name}"
[training]
rounds = {rounds}
nodes = {nodes}
[evaluation]
every = 3
"""


@pytest.fixture(scope="module")
def first_job(
    hypergpu: Run, nodes: list[subprocess.Popen[str]], folder: Path
) -> list[dict[str, Any]]:
    """A planned job for two nodes, watched to its end: every line of JSON that was printed."""
    assert len(nodes) == 2
    (folder / "job.toml").write_text(JOB_FILE.format(name="first", rounds=6, nodes=2), "utf-8")
    process = hypergpu("job", "submit", "job.toml", "--watch", "--json")
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]
