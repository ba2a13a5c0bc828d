"""Warm starts of benchmarks: a fork answers as a worker that was started would."""

import os
import subprocess
import sys

from benchmarks.ours.warm import warm_starts


def answer_of_a_worker(environment: dict[str, str]) -> tuple[int, bytes]:
    """Start a torch worker that finds its stdin at an end; return its status and its words."""
    argv = [sys.executable, "-P", "-m", "gpu_node.shell.worker", "--kind", "torch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False
    )
    return done.returncode, done.stdout


def test_a_fork_answers_as_a_started_worker_does() -> None:
    with warm_starts() as environment:
        assert answer_of_a_worker(environment) == answer_of_a_worker({})


def test_without_its_server_a_worker_starts_by_itself() -> None:
    with warm_starts() as environment:
        pass
    status, words = answer_of_a_worker(environment)
    assert status == 0
    assert words
