"""Seconds until a node's update counts again where the active coordinator is killed or stops.

Two coordinators on one PostgreSQL, of which `.ci/with_postgres.py` tells, and one S3 server.
"""

import os
import secrets
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from benchmarks.ours.cluster import LOOPBACK, ONE_THREAD, BenchmarkError, Running
from benchmarks.ours.table import PartFigures
from coordinator.shell.journal.database import journal_url
from hypergpu.client import Coordinator, JobEvent
from hypergpu.cluster.cluster import Listen, coordinator_command, operator, wait_until_ready
from hypergpu.cluster.processes import kill_group, start
from hypergpu.cluster.s3_server import BUCKET, S3Server
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.wire.network import free_ports

_POSTGRES = "HYPERGPU_TEST_POSTGRES_URL"
_NODES = 2
_SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=1_000_000, inner_steps=20, nodes=_NODES),
)
_HEARTBEAT_MS = "2000"


class PairedCoordinator(NamedTuple):
    """A coordinator's process, which drives or stands by."""

    folder: Path
    child: "subprocess.Popen[str]"


def takeover_figures(times: int) -> PartFigures:
    """Measure the kill, with the folder deleted, and the stop, so often."""
    killed = [_measure(_kill) for _ in range(times)]
    stopped = [_measure(_stop) for _ in range(times)]
    found = {"takeover_s": killed, "takeover_stopped_s": stopped}
    return PartFigures(
        rows=[
            [label, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
            for label, seconds in (("SIGKILL, folder deleted", killed), ("SIGSTOP", stopped))
        ],
        metrics={key: statistics.median(seconds) for key, seconds in found.items()},
        notes=(
            f"Median and longest of {times}; to the first accepted update under the successor.",
            f"Tenures of 5 s, heartbeats of {_HEARTBEAT_MS} ms, {_NODES} nodes, TLS, rclone's S3.",
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
        url = owner.enter_context(_schema())
        server = owner.enter_context(S3Server(folder / "s3"))
        environment = {**server.environment, **_settings(folder, url)}
        active = _start_coordinator(folder / "first", environment, owner)
        ready = wait_until_ready(active.child)
        standby = _start_coordinator(folder / "second", environment, owner)
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


def _start_coordinator(
    folder: Path, environment: dict[str, str], owner: ExitStack
) -> PairedCoordinator:
    folder.mkdir()
    port, node_port = free_ports(2)
    at = Listen(
        data_dir=folder / "coordinator",
        listen=LOOPBACK,
        port=port,
        node_port=node_port,
        bulk_port=0,
        blobs=f"s3://{BUCKET}/takeover",
    )
    log = folder / "coordinator.log"
    child = start(coordinator_command(at), log=log, is_read=True, environment=environment)
    owner.callback(kill_group, child)
    return PairedCoordinator(folder, child)


def _wait_for_line(child: "subprocess.Popen[str]") -> None:
    """The line of a standby."""
    if child.stdout is None or "standing_by" not in child.stdout.readline():
        raise BenchmarkError("the second coordinator does not stand by")


def _settings(folder: Path, url: str) -> dict[str, str]:
    passphrase = folder / "passphrase"
    passphrase.write_text("two words\n")
    passphrase.chmod(0o600)
    return {
        **ONE_THREAD,
        "HYPERGPU_COORDINATOR_TAKEOVER": "1",
        "HYPERGPU_COORDINATOR_DATABASE_URL": url,
        "HYPERGPU_COORDINATOR_PASSPHRASE_FILE": str(passphrase),
        "HYPERGPU_COORDINATOR_HEARTBEAT_INTERVAL_MS": _HEARTBEAT_MS,
    }


@contextmanager
def _schema() -> Iterator[str]:
    """The URL of an empty schema, gone afterwards."""
    server = os.environ.get(_POSTGRES, "")
    if not server:
        raise BenchmarkError(f"no PostgreSQL listens here: install one, or set {_POSTGRES}")
    name = f"hypergpu_benchmark_{secrets.token_hex(6)}"
    engine = create_engine(journal_url(server))
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    url = make_url(server).update_query_dict({"options": f"-csearch_path={name}"})
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
        engine.dispose()
