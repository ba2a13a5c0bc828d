"""The files on one update's way, traced in the processes of a tiny paid job.

The way begins when the worker has trained and ends when the receipt is settled on a local chain.
Processes log their calls (`benchmarks.hooks.call_trace`). Functions that run in the middle of the
training too, such as heartbeats and probes, are not the update's.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.hooks.call_trace import TRACE_VARIABLE
from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.warm import HOOKS, changed_environment
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings

WORKER = "gpu_node/shell/worker/__main__.py"
NOT_COUNTED = (".venv/", "benchmarks/", "hypergpu/v1/", "hypergpu/cluster/")
"""Libraries, what traces, generated stubs, and what only starts processes."""
_STEP_MS = 5_000
_STEPS = 6
_STEADY_NS = 12 * 10**9
"""Time before the end of the training in which only heartbeats and probes happen."""
_QUIET_S = 12.0
"""Settling has ended when no further function was called for so long."""
_SETTLED_WITHIN_S = 120.0
_JOB = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=1, inner_steps=_STEPS, nodes=1),
    evaluation=Evaluation(every=1),
    pay=Pay(unit_price=1_000, rounds_per_epoch=1),
)


class LoggedCall(NamedTuple):
    """One logged call."""

    at_ns: int
    file: str
    function: str


def traced_files() -> list[str]:
    """Run the job and return the files on its one update's way.

    Raises:
        BenchmarkError: The job did not finish.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            TRACE_VARIABLE: str(folder),
            "PYTHONPATH": str(HOOKS),
            "HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(_STEP_MS),
        }
        settings = {"HYPERGPU_COORDINATOR_CHAIN": "anvil"}
        with (
            changed_environment(environment),
            running(folder, is_plaintext=False, settings=settings) as cluster,
        ):
            settled_ns = _run_job(cluster)
        return files_after_training(list(folder.glob("*.calls")), settled_ns)


def _run_job(cluster: Running) -> int:
    """Run the job; return when it was settled. Nobody watches it: that would call functions too."""
    cluster.add_nodes(1, "numpy")
    with cluster.client() as client:
        job_id = client.submit(_JOB)
    time.sleep(_STEPS * _STEP_MS / 1000)
    _wait_until_quiet(cluster.folder)
    settled_ns = time.monotonic_ns()
    with cluster.client() as client:
        if (summary := client.job(job_id).job).phase != "finished":
            raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
    return settled_ns


def _wait_until_quiet(folder: Path) -> None:
    """Wait until the processes call no function that they have not called before."""
    known = 0
    changed_s = began_s = time.monotonic()
    while (now_s := time.monotonic()) - changed_s < _QUIET_S:
        if now_s - began_s > _SETTLED_WITHIN_S:
            raise BenchmarkError("the processes still call further functions")
        count = len({(c.file, c.function) for path in folder.glob("*.calls") for c in _calls(path)})
        if count != known:
            known, changed_s = count, time.monotonic()
        time.sleep(1.0)


def _calls(path: Path) -> Iterator[LoggedCall]:
    for line in path.read_text(encoding="utf-8").splitlines():
        at_ns, file, function = line.split(" ", 2)
        if not file.startswith(NOT_COUNTED):
            yield LoggedCall(int(at_ns), file, function)


def files_after_training(logs: list[Path], until_ns: int) -> list[str]:
    """Return the files of functions called after the training, and not in the middle of it."""
    calls = {path: list(_calls(path)) for path in logs}
    trained_ns = max(
        call.at_ns
        for found in calls.values()
        if any(call.file == WORKER for call in found)
        for call in found
        if call.file.startswith("hypergpu/workloads/")
    )
    every = [call for found in calls.values() for call in found]
    steady_ns = range(trained_ns - _STEADY_NS, trained_ns - _STEADY_NS // 10)
    steady = {(c.file, c.function) for c in every if c.at_ns in steady_ns}
    after = {(c.file, c.function) for c in every if trained_ns <= c.at_ns <= until_ns}
    return sorted({file for file, _ in after - steady})
