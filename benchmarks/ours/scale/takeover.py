"""Seconds until a node's update counts again where the active coordinator is killed or stops.

Two coordinators on one PostgreSQL and one S3 server.
"""

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.ours.cluster import BenchmarkError, Running
from benchmarks.ours.scale.coordinators import (
    HEARTBEAT_MS,
    PairedCoordinator,
    empty_schema,
    start_coordinator,
    takeover_settings,
)
from benchmarks.ours.table import PartFigures
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator, JobEvent
from hypergpu.user.cluster.cluster import operator, wait_until_ready
from hypergpu.user.cluster.processes import kill_group
from hypergpu.user.cluster.s3_server import S3Server

_NODES = 2
_SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=1_000_000, inner_steps=20, nodes=_NODES),
)


def takeover_figures(times: int) -> PartFigures:
    """Measure the kill, with the folder deleted, and the stop, so often."""
    killed_s = [_measure(_kill) for _ in range(times)]
    stopped_s = [_measure(_stop) for _ in range(times)]
    seconds_by_key = {"takeover_s": killed_s, "takeover_stopped_s": stopped_s}
    return PartFigures(
        rows=[
            [label, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
            for label, seconds in (("SIGKILL, folder deleted", killed_s), ("SIGSTOP", stopped_s))
        ],
        metrics={key: statistics.median(seconds) for key, seconds in seconds_by_key.items()},
        notes=(
            f"Median and longest of {times}; to the first accepted update under the successor.",
            f"Tenures of 5 s, heartbeats of {HEARTBEAT_MS} ms, {_NODES} nodes, TLS, rclone's S3.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def _kill(active: PairedCoordinator) -> None:
    kill_group(active.child)
    shutil.rmtree(active.folder / "coordinator")


def _stop(active: PairedCoordinator) -> None:
    os.kill(active.child.pid, signal.SIGSTOP)


def _measure(disturb: Callable[[PairedCoordinator], None]) -> float:
    with ExitStack() as owner:
        folder = Path(owner.enter_context(tempfile.TemporaryDirectory()))
        url = owner.enter_context(empty_schema())
        server = owner.enter_context(S3Server(folder / "s3"))
        environment = {**server.environment, **takeover_settings(folder, url)}
        active = start_coordinator(folder / "first", environment, owner)
        ready = wait_until_ready(active.child)
        standby = start_coordinator(folder / "second", environment, owner)
        _wait_for_line(standby.child)
        Running(active.folder, ready, active.child, owner).add_nodes(_NODES, "numpy")
        with operator(ready) as client:
            job_id = client.submit(_SPEC)
            last = _next_update(client, job_id, 3 * _NODES)
        began_s = time.monotonic()
        disturb(active)
        with operator(wait_until_ready(standby.child)) as client:
            _next_update(client, job_id, 1, after=last)
        return time.monotonic() - began_s


def _next_update(client: Coordinator, job_id: str, count: int, after: int = -1) -> int:
    """Sequence of the update of that number that is accepted after a row that was seen.

    Rows that were journalled just before the disturbance, and not seen, count for nothing.
    """
    takeover = after < 0
    for update in client.watch(job_id, after + 1):
        if not isinstance(update, JobEvent):
            continue
        takeover |= update.kind == "CoordinatorChanged"
        if takeover and update.kind == "UpdateReceived":
            count -= 1
            if not count:
                return update.sequence
    raise BenchmarkError(f"{job_id} ended")


def _wait_for_line(child: "subprocess.Popen[str]") -> None:
    """The line of a standby."""
    if child.stdout is None or "standing_by" not in child.stdout.readline():
        raise BenchmarkError("the second coordinator does not stand by")
