"""Processes of many sessions: told in lines on their stdin, answering in lines of JSON."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError
from hypergpu.user.cluster.processes import kill_group

Answer = TypeVar("Answer")


@contextmanager
def session_process(
    folder: Path, name: str, module: str, *arguments: str
) -> "Iterator[subprocess.Popen[str]]":
    """Run a module, which logs into the folder; it is killed at the end."""
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=os.environ | ONE_THREAD,
        )
    try:
        yield child
    finally:
        kill_group(child)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def tell(child: "subprocess.Popen[str]", line: str) -> None:
    """Write a line to a process."""
    if child.stdin is None:
        raise AssertionError("the child was spawned with a pipe")
    child.stdin.write(line + "\n")
    child.stdin.flush()


def read_answer(child: "subprocess.Popen[str]", kind: type[Answer]) -> Answer:
    """Read a line from a process.

    Raises:
        BenchmarkError: It ended.
    """
    line = child.stdout.readline() if child.stdout is not None else ""
    if not line:
        raise BenchmarkError("a process ended before it had said what it measured")
    return msgspec.json.decode(line, type=kind)


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)
