"""A round whose bytes go through an object store, beside one through the coordinator itself.

Fifty nodes without a worker send int4 updates of 25M parameters and fetch what the round made.
The store is rclone's S3 server on the same machine.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError, Running, running
from benchmarks.ours.table import ResultTable
from benchmarks.ours.transfer_nodes import TransferNodes
from benchmarks.round_overhead import WARM_UP_ROUNDS, trained_seconds
from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    Inner,
    JobSpec,
    RoundRule,
    TrainingSettings,
)
from hypergpu.user.cluster.processes import kill_group
from hypergpu.user.cluster.s3_server import BUCKET, S3Server

_PATIENCE_MS = 300_000
NODES_ARE_SILENT = {"HYPERGPU_COORDINATOR_LOST_AFTER_MS": "600000"}
"""Nodes without a daemon have no heartbeat."""


class Amount(NamedTuple):
    """How much is moved."""

    nodes: int
    parameters: int
    rounds: int


class StoreFigures(NamedTuple):
    """What was found with one store."""

    round_s: Sequence[float]
    weights_bytes: Sequence[int]
    """What the messages of a node in a round weigh."""


def run(is_quick: bool) -> ResultTable:
    """Measure both stores by turns."""
    amount = Amount(10, 1_000_000, 3) if is_quick else Amount(50, 25_000_000, 4)
    embedded_store, bucket = _measure(amount, with_bucket=False), _measure(amount, with_bucket=True)
    ratio = statistics.median(bucket.round_s) / statistics.median(embedded_store.round_s)
    weight = statistics.median(bucket.weights_bytes)
    return ResultTable(
        title=f"A round of {amount.nodes} nodes, int4 of {amount.parameters // 1_000_000}M",
        columns=("", "seconds a round", "bytes of calls a node and round", "against embedded"),
        rows=[
            _row("embedded", embedded_store, 1.0),
            _row("rclone's S3 server", bucket, ratio),
        ],
        metrics={"coordinator_bytes_per_update": weight, "s3_over_embedded": ratio},
        notes=(
            "Bytes of calls: messages of OfferUpdate, CommitUpdate and ResolveBlob, median.",
            f"The first {WARM_UP_ROUNDS} of {amount.rounds + WARM_UP_ROUNDS} rounds left out.",
            "Coordinator, store and all nodes share this machine: with a store that is not on it",
            "the coordinator's line carries each update once and each model once.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def _row(name: str, found: StoreFigures, ratio: float) -> list[str]:
    seconds, weight = statistics.median(found.round_s), statistics.median(found.weights_bytes)
    return [name, f"{seconds:.2f} [{min(found.round_s):.2f}]", f"{weight:.0f}", f"{ratio:.2f}"]


def _measure(amount: Amount, *, with_bucket: bool) -> StoreFigures:
    with tempfile.TemporaryDirectory() as name, ExitStack() as owner:
        folder = Path(name)
        settings: Mapping[str, str] = NODES_ARE_SILENT
        if with_bucket:
            server = owner.enter_context(S3Server(folder / "buckets"))
            address = {"HYPERGPU_COORDINATOR_BLOBS": f"s3://{BUCKET}/benchmark"}
            settings = {**NODES_ARE_SILENT, **server.environment, **address}
        cluster = owner.enter_context(running(folder, is_plaintext=True, settings=settings))
        nodes = owner.enter_context(_transfer_nodes(cluster, amount.nodes))
        seconds = trained_seconds(cluster, _spec_of(amount))
        weights = [int(line) for line in nodes.read_text("ascii").splitlines()]
    # The first round sends no delta.
    return StoreFigures(seconds, weights[WARM_UP_ROUNDS * amount.nodes :])


def _spec_of(amount: Amount) -> JobSpec:
    rounds = amount.rounds + WARM_UP_ROUNDS
    return JobSpec(
        workload="null",
        options={"parameters": amount.parameters},
        training=TrainingSettings(rounds=rounds, inner_steps=1, nodes=amount.nodes),
        inner=Inner(),
        codec=CodecChoice(up="int4", down="int4"),
        round=RoundRule(deadline_ms=_PATIENCE_MS),
        evaluation=Evaluation(every=rounds),
    )


@contextmanager
def _transfer_nodes(cluster: Running, count: int) -> Iterator[Path]:
    """Run nodes; gives the file of what their calls weigh."""
    order = TransferNodes(count, str(cluster.folder), cluster.node_token())
    weights_file, log = cluster.folder / "weights", cluster.folder / "nodes.log"
    with weights_file.open("wb") as out, log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ours.transfer_nodes"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=os.environ | ONE_THREAD,
        )
    try:
        if child.stdin is None:
            raise BenchmarkError("the nodes have no pipe")
        with child.stdin:
            child.stdin.write(msgspec.json.encode(order).decode() + "\n")
        yield weights_file
    finally:
        kill_group(child)
