"""Processor time of a round in which nothing is trained, over all processes that take part."""

import statistics
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.table import ResultTable
from benchmarks.round_overhead import WARM_UP_ROUNDS, spec_of
from hypergpu.user.client import JobEvent

PARAMETERS, NODES = 1_000_000, 2
ROUNDS, QUICK_ROUNDS = 100, 40
TURNS, QUICK_TURNS = 3, 1
WANTED_MS = 45.0
_MODULES = {
    "coordinator": "coordinator",
    "coordinator.shell.store.bulk": "its bulk process",
    "coordinator.shell.evaluator": "its evaluators",
    "gpu_node": "nodes",
    "gpu_node.shell.worker": "their workers",
}


def run(is_quick: bool) -> ResultTable:
    """Take several swarms one after the other and the median of each figure."""
    rounds, turns = (QUICK_ROUNDS, QUICK_TURNS) if is_quick else (ROUNDS, TURNS)
    measured_ms = [cpu_ms_of_a_round(rounds) for _ in range(turns)]
    sums_ms = [sum(each.values()) for each in measured_ms]
    middle_ms = statistics.median(sums_ms)
    parts_ms = {
        name: statistics.median(each[name] for each in measured_ms) for name in _MODULES.values()
    }
    span = f"{min(sums_ms):.0f} to {max(sums_ms):.0f}"
    return ResultTable(
        title="Processor time of a round, 1M float32 parameters, 2 nodes",
        columns=("", "ms", "wanted"),
        rows=[
            *([name, f"{part_ms:.1f}", ""] for name, part_ms in parts_ms.items()),
            ["all", f"{middle_ms:.1f}", f"{WANTED_MS:g}"],
        ],
        metrics={"cpu_ms_1m_2": middle_ms},
        notes=(
            f"Medians of {turns} swarms of {rounds} rounds each; all: {span} ms.",
            "User and system time of every process of the swarm, both ways float32, no TLS;",
            f"the first {WARM_UP_ROUNDS} rounds, starts of processes and training are left out.",
        ),
    )


def cpu_ms_of_a_round(rounds: int) -> dict[str, float]:
    """Processor milliseconds of a round by what a process is.

    Raises:
        BenchmarkError: The job ended before its rounds were done.
    """
    with tempfile.TemporaryDirectory() as name, running(Path(name), is_plaintext=True) as cluster:
        nodes = cluster.add_nodes(NODES, "null")
        roots = [cluster.coordinator.pid, *(node.pid for node in nodes)]
        ends = _round_ends(cluster, rounds)
        for _ in range(WARM_UP_ROUNDS):
            next(ends)
        before_s = _cpu_seconds(roots)
        for _ in range(rounds):
            next(ends)
        after_s = _cpu_seconds(roots)
    return {each: 1000 * (after_s[each] - before_s[each]) / rounds for each in before_s}


def _round_ends(cluster: Running, rounds: int) -> Iterator[None]:
    """Yield as each round ends; the last one evaluates, so that one more than counted runs."""
    with cluster.client() as client:
        job_id = client.submit(spec_of(PARAMETERS, NODES, WARM_UP_ROUNDS + rounds + 1))
        for update in client.watch(job_id):
            if isinstance(update, JobEvent) and update.kind == "RoundRecorded":
                yield
        summary = client.job(job_id).job
    raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}; see {cluster.folder}")


def _cpu_seconds(roots: Iterable[int]) -> dict[str, float]:
    seconds = dict.fromkeys(_MODULES.values(), 0.0)
    for root in map(psutil.Process, roots):
        for process in (root, *root.children(recursive=True)):
            words = process.cmdline()
            times = process.cpu_times()
            seconds[_MODULES[words[words.index("-m") + 1]]] += times.user + times.system
    return seconds
