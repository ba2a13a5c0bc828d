"""Bytes over the coordinator's own line for each accepted update, where a bucket carries the data.

Real daemons over mutual TLS dial a proxy that counts what passes. The bucket is another port:
models and updates do not count, whatever the coordinator says of them does.
"""

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import LOOPBACK, BenchmarkError, running
from benchmarks.ours.counting_proxy import CountingProxy
from benchmarks.ours.table import PartFigures
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator, JobEvent
from hypergpu.user.cluster.s3_server import BUCKET, S3Server
from hypergpu.wire.credentials import split_address, with_addresses

_PROXY = "127.0.0.2"
_WARM_UP_ROUNDS = 3


class ControlLoad(NamedTuple):
    """How much is measured."""

    nodes: int
    rounds: int
    idle_s: float


class _Window(NamedTuple):
    """What passed while some updates were accepted."""

    up_bytes: int
    down_bytes: int
    updates: int
    seconds: float


def control_bytes(load: ControlLoad) -> PartFigures:
    """Measure rounds, and then the same nodes without work."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-control-") as name:
        training, idle = _measure(Path(name), load)
    up, down = training.up_bytes / training.updates, training.down_bytes / training.updates
    idle_bytes_per_s = (idle.up_bytes + idle.down_bytes) / idle.seconds / load.nodes
    round_s = training.seconds / load.rounds
    return PartFigures(
        rows=[
            ["bytes to and from the coordinator an accepted update", f"{up + down:,.0f}"],
            ["of them from nodes, to nodes", f"{up:,.0f}, {down:,.0f}"],
            ["an idle node, bytes a second", f"{idle_bytes_per_s:.0f}"],
        ],
        metrics={
            "coordinator_bytes_per_update": up + down,
            "coordinator_idle_bytes_per_s": idle_bytes_per_s,
            "control_round_s": round_s,
        },
        notes=[
            f"{load.nodes} daemons, mutual TLS, rclone's S3; payload of TCP, both ways.",
            f"{training.updates} updates in rounds of {round_s:.2f} s, all messages with them.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ],
    )


def _measure(folder: Path, load: ControlLoad) -> tuple[_Window, _Window]:
    with ExitStack() as owner:
        server = owner.enter_context(S3Server(folder / "buckets"))
        blobs = {"HYPERGPU_COORDINATOR_BLOBS": f"s3://{BUCKET}/benchmark"}
        settings = {**server.environment, **blobs}
        cluster = owner.enter_context(running(folder, is_plaintext=False, settings=settings))
        port = split_address(cluster.ready.address)[1]
        proxy = CountingProxy(_PROXY, LOOPBACK)
        owner.enter_context(proxy.serve((port, cluster.ready.node_port)))
        token = with_addresses(cluster.node_token(), (f"{_PROXY}:{port}",))
        cluster.add_nodes(load.nodes, "numpy", token=token)
        with cluster.client() as client:
            training = _count_rounds(client, load, proxy)
        began_s, before = time.monotonic(), proxy.counts
        time.sleep(load.idle_s)
        idle = _window(before, proxy, 0, began_s)
    return training, idle


def _count_rounds(client: Coordinator, load: ControlLoad, proxy: CountingProxy) -> _Window:
    training = TrainingSettings(
        rounds=_WARM_UP_ROUNDS + load.rounds, inner_steps=20, nodes=load.nodes
    )
    job_id = client.submit(JobSpec(workload="digits-softmax", training=training))
    rounds = updates = 0
    began_s, before, first = time.monotonic(), (0, 0), 0
    for update in client.watch(job_id):
        if not isinstance(update, JobEvent):
            continue
        updates += update.kind == "UpdateReceived"
        if update.kind == "RoundRecorded":
            rounds += 1
            if rounds == _WARM_UP_ROUNDS:
                began_s, before, first = time.monotonic(), proxy.counts, updates
            if rounds == _WARM_UP_ROUNDS + load.rounds:
                return _window(before, proxy, updates - first, began_s)
    raise BenchmarkError(f"{job_id} ended before its rounds")


def _window(before: tuple[int, int], proxy: CountingProxy, updates: int, began_s: float) -> _Window:
    now = proxy.counts
    return _Window(now[0] - before[0], now[1] - before[1], updates, time.monotonic() - began_s)
