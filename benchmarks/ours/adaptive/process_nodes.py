"""A coordinator and nodes of unlike speed as processes on this machine."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError, Running, running
from hypergpu.command_line import program
from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.processes import kill_group, start

_READY_S, _JOB_S, _POLL_S = 60.0, 300.0, 0.1


def run_job(client: Coordinator, spec: JobSpec) -> str:
    """Run a job to its end; its id.

    Raises:
        BenchmarkError: It did not get there.
    """
    began_s = time.monotonic()
    job_id = client.submit(spec)
    while time.monotonic() - began_s < _JOB_S:
        job = client.job(job_id).job
        if job.phase == "finished":
            return job_id
        if job.phase in ("failed", "stopped", "paused"):
            raise BenchmarkError(f"{job_id} is {job.phase}: {job.reason}")
        time.sleep(_POLL_S)
    raise BenchmarkError(f"{job_id} has not ended after {_JOB_S:.0f} s")


def join_node(cluster: Running, name: str, floor_ms: int) -> None:
    """Join a node whose steps take so long at least."""
    state = cluster.folder / name
    place = ("--state-dir", str(state))
    command = program("gpu_node", "join", "--token-file", "-", *place, "--worker", "numpy")
    settings = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(floor_ms), "HYPERGPU_NODE_NAME": name}
    environment = ONE_THREAD | settings
    log = cluster.folder / f"{name}.log"
    child = start(command, secret=cluster.node_token(), log=log, environment=environment)
    cluster.owner.callback(kill_group, child)


def wait_for_nodes(client: Coordinator, count: int) -> None:
    """Wait until so many nodes are here.

    Raises:
        BenchmarkError: They were not in time.
    """
    until_s = time.monotonic() + _READY_S
    while sum(node.state != "away" for node in client.nodes()) < count:
        if time.monotonic() > until_s:
            raise BenchmarkError(f"{count} nodes did not join within {_READY_S:.0f} s")
        time.sleep(_POLL_S)


@contextmanager
def fleet_hub() -> Iterator[Running]:
    """A coordinator in a folder of its own, without TLS, which ends with all its nodes."""
    with (
        tempfile.TemporaryDirectory(prefix="hypergpu-fleet-") as folder,
        running(Path(folder), is_plaintext=True) as cluster,
    ):
        yield cluster
