"""What a round costs when nothing is trained, beside the floor and the systems we stand beside.

Contenders take turns, so that a busy minute of the machine hits all of them alike.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.table import ResultTable
from benchmarks.peers.measured import WARM_UP_ROUNDS as PEERS_WARM_UP_ROUNDS
from benchmarks.peers.seconds import peer_seconds
from coordinator.shell.store.blobs.writing import sync_file
from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    Inner,
    JobSpec,
    OuterSettings,
    TrainingSettings,
)
from hypergpu.user.client import JobEvent

WARM_UP_ROUNDS = 3
"""The first rounds start workers, send a new model whole and touch memory for the first time."""


def spec_of(parameters: int, nodes: int, rounds: int) -> JobSpec:
    """What the peers do: float32 both ways and a plain mean, evaluated at the end only."""
    return JobSpec(
        workload="null",
        options={"parameters": parameters},
        training=TrainingSettings(rounds=rounds, inner_steps=1, nodes=nodes),
        inner=Inner(),
        outer=OuterSettings(learning_rate=1.0, momentum=0.0),
        codec=CodecChoice(up="fp32", down="fp32"),
        evaluation=Evaluation(every=rounds),
    )


def our_seconds(
    parameters: int, nodes: int, rounds: int, *, is_plaintext: bool = True
) -> tuple[float, ...]:
    """Measure rounds by the coordinator's journal, from the end of one to the end of the next."""
    with (
        tempfile.TemporaryDirectory() as name,
        running(Path(name), is_plaintext=is_plaintext) as cluster,
    ):
        cluster.add_nodes(nodes, "null")
        return trained_seconds(cluster, spec_of(parameters, nodes, rounds + WARM_UP_ROUNDS))


def trained_seconds(cluster: Running, spec: JobSpec) -> tuple[float, ...]:
    """Run a job to its end and give the seconds of each round after the warm-up."""
    with cluster.client() as client:
        job_id = client.submit(spec)
        ends_ms = [
            update.at_ms
            for update in client.watch(job_id)
            if isinstance(update, JobEvent) and update.kind == "RoundRecorded"
        ]
        summary = client.job(job_id).job
    if summary.phase != "finished" or len(ends_ms) != spec.training.rounds:
        raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
    counted_ends_ms = ends_ms[WARM_UP_ROUNDS - 1 :]
    return tuple((after - before) / 1000 for before, after in itertools.pairwise(counted_ends_ms))


class Size(NamedTuple):
    """One row: how large, how many, how often."""

    parameters: int
    nodes: int
    rounds: int
    slow_rounds: int
    """For contenders that take seconds a round; 0: only the floor and we are measured."""

    @property
    def name(self) -> str:
        """As in the keys of the metrics."""
        return f"{self.parameters // 1_000_000}m_{self.nodes}"


class Contender(NamedTuple):
    """A system, and whether a round of it takes seconds."""

    name: str
    measure: Callable[[Size, int], tuple[float, ...]]
    is_slow: bool = False
    is_in_quick: bool = True


SIZES = (
    Size(1_000_000, 2, rounds=60, slow_rounds=3),
    Size(25_000_000, 2, rounds=12, slow_rounds=3),
    Size(25_000_000, 4, rounds=6, slow_rounds=0),
)
QUICK_SIZES = (
    Size(1_000_000, 2, rounds=20, slow_rounds=1),
    Size(25_000_000, 2, rounds=3, slow_rounds=1),
)
TURNS = 2
GLOO, FLOOR = "gloo", "gloo and fsync, the floor"
OURS, OURS_TLS = "HyperGPU", "HyperGPU, TLS"
LEAN, DEPLOYED, HIVEMIND = "Flower, gRPC", "Flower, deployed", "hivemind"
PEER_KEYS = {LEAN: "flower_lean", DEPLOYED: "flower_deployed", HIVEMIND: "hivemind"}

FEW = frozenset({GLOO, FLOOR, OURS, OURS_TLS})
"""Contenders of a size that not all take part in."""

Seconds = Mapping[str, Sequence[float]]
"""Each contender's rounds."""


def _peer(script: str) -> Callable[[Size, int], tuple[float, ...]]:
    return lambda size, rounds: peer_seconds(script, size.parameters, size.nodes, rounds)


def _ours(*, is_plaintext: bool) -> Callable[[Size, int], tuple[float, ...]]:
    return lambda size, rounds: our_seconds(
        size.parameters, size.nodes, rounds, is_plaintext=is_plaintext
    )


def fsync_seconds(size: Size, rounds: int) -> tuple[float, ...]:
    """How long updates take to become durable: a file a node, written by a thread each."""
    content = os.urandom(4 * size.parameters)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(size.nodes) as threads:
        paths = [Path(name) / str(number) for number in range(size.nodes)]
        times_s = []
        for _ in range(rounds):
            list(threads.map(lambda path: path.write_bytes(content), paths))
            began_s = time.monotonic()
            list(threads.map(sync_file, paths))
            times_s.append(time.monotonic() - began_s)
    return tuple(times_s)


CONTENDERS = (
    Contender(GLOO, _peer("gloo")),
    Contender(FLOOR, fsync_seconds),
    Contender(OURS, _ours(is_plaintext=True)),
    Contender(OURS_TLS, _ours(is_plaintext=False), is_in_quick=False),
    Contender(LEAN, _peer("flower_lean")),
    Contender(HIVEMIND, _peer("hivemind_averager"), is_in_quick=False),
    Contender(DEPLOYED, _peer("flower_deployed"), is_slow=True, is_in_quick=False),
)


def run(is_quick: bool) -> ResultTable:
    """Measure every size with every contender."""
    sizes = QUICK_SIZES if is_quick else SIZES
    contenders = [each for each in CONTENDERS if each.is_in_quick or not is_quick]
    seconds_by_size = {
        size.name: measure_turns(size, contenders, 1 if is_quick else TURNS) for size in sizes
    }
    return ResultTable(
        title="Seconds per round with no training: median, least in brackets",
        columns=("", *(f"{size.parameters // 1_000_000}M, {size.nodes} nodes" for size in sizes)),
        rows=[
            [
                each.name,
                *(median_and_least(seconds_by_size[size.name].get(each.name)) for size in sizes),
            ]
            for each in contenders
        ],
        metrics=metrics(seconds_by_size),
        notes=(
            "float32 both ways on loopback, a process each for the hub and every node.",
            "The outer step is a plain mean, as the peers': learning rate 1, no momentum.",
            "From the end of a round to the end of the next, ours by the coordinator's journal.",
            f"First rounds left out: {WARM_UP_ROUNDS} of ours, {PEERS_WARM_UP_ROUNDS} of a peer.",
            "We put updates and models on disk, updates durably, and digest them at both ends;",
            "the others keep everything in memory. Only the TLS row is encrypted.",
            "The floor is gloo's median and that of an fsync of the updates, a thread a file.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def measure_turns(
    size: Size, contenders: Sequence[Contender], turns: int
) -> dict[str, list[float]]:
    """Let the contenders take turns at one size; what is slow has one turn."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    for turn in range(turns):
        for each in contenders:
            if (each.is_slow and turn) or not (size.slow_rounds or each.name in FEW):
                continue
            rounds = size.slow_rounds if each.is_slow else max(1, size.rounds // turns)
            sys.stderr.write(f"{size.name}: {each.name}\n")
            seconds[each.name] += each.measure(size, rounds)
    # What we promise is durable: the floor is gloo and the sync of the same bytes.
    fsync_s = statistics.median(seconds[FLOOR])
    seconds[FLOOR] = [each + fsync_s for each in seconds[GLOO]]
    return {name: times_s for name, times_s in seconds.items() if times_s}


def median_and_least(seconds: Sequence[float] | None) -> str:
    """Median and least; a dash for what was not measured."""
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.3f} [{min(seconds):.3f}]"


def metrics(found: Mapping[str, Seconds]) -> dict[str, float]:
    """Medians of every row and column measured, and the ratios that we promise."""
    medians = {
        size: {name: statistics.median(each) for name, each in seconds.items()}
        for size, seconds in found.items()
    }
    values = {f"seconds_{size}": each[OURS] for size, each in medians.items()}
    for size, each in medians.items():
        values[f"over_floor_{size}"] = each[OURS] / each[FLOOR]
        if OURS_TLS in each:
            values[f"tls_seconds_{size}"] = each[OURS_TLS]
            values[f"tls_over_floor_{size}"] = each[OURS_TLS] / each[FLOOR]
        for peer, key in PEER_KEYS.items():
            if peer in each:
                values[f"{key}_over_ours_{size}"] = each[peer] / each[OURS]
    return values
