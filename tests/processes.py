"""Real coordinators and nodes: started, read, killed, looked for. Nothing waits by the clock."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from hypergpu.command_line import program
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.client import Coordinator, JobDetail, JobEvent, JobView
from hypergpu.user.cluster.cluster import ReadyLine, operator, wait_until_ready
from hypergpu.user.cluster.processes import kill_group
from hypergpu.wire.credentials import Role
from hypergpu.wire.free_ports import free_ports
from tests.program_forks import start_program
from tests.warm_workers import warm_variables

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    **warm_variables(),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Each spare imports torch beside the next test.
    "HYPERGPU_COORDINATOR_EVALUATOR_SPARES": "0",
    "HYPERGPU_NODE_WORKER_SPARES": "0",
    # A coordinator that is killed every other second finds its nodes there again at once.
    "HYPERGPU_NODE_RECONNECT_CAP_MS": "1000",
}


class CoordinatorProcess:
    """One coordinator's folder and ports, with a process that comes and goes."""

    module = "coordinator"
    """The program that is started."""

    def __init__(self, folder: Path, *flags: str, is_plaintext: bool = True) -> None:
        self.folder = folder
        self.data_dir = folder / "coordinator"
        self.log = folder / "coordinator.log"
        port, node_port = free_ports(2)
        self.address, self.node_address = f"127.0.0.1:{port}", f"127.0.0.1:{node_port}"
        self._arguments = [
            *("--data-dir", str(self.data_dir), "--listen", "127.0.0.1"),
            *("--port", str(port), "--node-port", str(node_port), "--bulk-port", "0"),
            *(["--plaintext"] if is_plaintext else []),
            *flags,
        ]
        self.environment: dict[str, str] = {}
        """Added to every later start's."""
        self._child: subprocess.Popen[str] | None = None
        self._ready: ReadyLine | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def freeze(self) -> Iterator[None]:
        """Let it stand still, alive, for as long as the block lasts."""
        os.killpg(self.child.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.child.pid, signal.SIGCONT)

    def start(self, *, failpoints: str = "") -> None:
        """Start it and wait for its ready line."""
        self.launch(failpoints=failpoints)
        self.wait_until_serving()

    def launch(self, *, failpoints: str = "") -> "subprocess.Popen[str]":
        """Start it and wait for nothing."""
        environment = {**ENVIRONMENT, "HYPERGPU_FAILPOINTS": failpoints, **self.environment}
        command = program(self.module, *self._arguments)
        self._child = start_program(command, log=self.log, is_read=True, environment=environment)
        return self._child

    def wait_until_serving(self) -> None:
        """Wait for the ready line of a process that was launched."""
        self._ready = wait_until_ready(self.child)

    def wait_until_standing_by(self) -> None:
        """Wait for its line that another coordinator drives."""
        assert self.child.stdout is not None, "its output is read"
        for line in self.child.stdout:
            if "standing_by" in json.loads(line):
                return
        raise AssertionError(f"it ended: see {self.log}")

    @property
    def child(self) -> "subprocess.Popen[str]":
        """The process of the last start."""
        assert self._child is not None, "start it first"
        return self._child

    def client(self) -> Coordinator:
        """A connection with the operator's token."""
        assert self._ready is not None, "start it first"
        return operator(self._ready)

    @property
    def bulk_port(self) -> int:
        """Port of bulk bytes since the newest start."""
        assert self._ready is not None, "start it first"
        return self._ready.bulk_port

    @property
    def metrics_port(self) -> int:
        """Port with `/metrics`."""
        assert self._ready is not None, "start it first"
        return self._ready.metrics_port

    def node_token(self) -> str:
        """A token that any number of nodes may join with."""
        with self.client() as client:
            return client.create_token(Role.NODE, ttl_s=3600, uses=0, label="test").token

    def kill(self) -> None:
        """SIGKILL."""
        kill_group(self.child)
        self._close_output()

    def terminate(self) -> int:
        """SIGTERM; gives the exit status."""
        self.child.send_signal(signal.SIGTERM)
        status = self.child.wait(timeout=240)
        self._close_output()
        return status

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self._child is not None:
            kill_group(self._child)
            self._close_output()

    def _close_output(self) -> None:
        if self.child.stdout is not None:
            self.child.stdout.close()


class NodeProcess:
    """One node's folder, with a daemon that comes and goes."""

    def __init__(
        self,
        folder: Path,
        name: str,
        worker: str = "numpy",
        settings: Mapping[str, str] | None = None,
        kinds: Sequence[str] = (),
    ) -> None:
        self.state_dir = folder / name
        if kinds:
            # As its owner would write it before the node joins.
            self.state_dir.mkdir(mode=0o700)
            (self.state_dir / "node.toml").write_text(f"kinds = {json.dumps(kinds)}\n")
        self.log = folder / f"{name}.log"
        self._worker = worker
        self._environment = {**ENVIRONMENT, **(settings or {})}
        self._child: subprocess.Popen[str] | None = None

    def join(self, token: str) -> None:
        """Start it for the first time."""
        self._start("join", "--token-file", "-", secret=token)

    def run(self) -> None:
        """Start it again from its state."""
        self._start("run")

    def _start(self, *words: str, secret: str | None = None) -> None:
        arguments = ("--state-dir", str(self.state_dir), "--worker", self._worker)
        command = program("gpu_node", *words, *arguments)
        self._child = start_program(
            command, secret=secret, log=self.log, environment=self._environment
        )

    @property
    def child(self) -> "subprocess.Popen[str]":
        """The daemon of the last start."""
        assert self._child is not None, "start it first"
        return self._child

    def kill(self) -> None:
        """SIGKILL the daemon and its worker."""
        kill_group(self.child)

    def terminate(self) -> int:
        """SIGTERM; gives the exit status."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(timeout=240)

    def end(self) -> None:
        """Leave nothing behind."""
        if self._child is not None:
            kill_group(self._child)


class Cluster:
    """A coordinator and its nodes in one folder; leaving the block ends them all."""

    def __init__(self, folder: Path, *flags: str, is_plaintext: bool = True) -> None:
        self.folder = folder
        self.coordinator = CoordinatorProcess(folder, *flags, is_plaintext=is_plaintext)
        self.nodes: list[NodeProcess] = []

    def __enter__(self) -> Self:
        self.coordinator.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            node.end()
        self.coordinator.end()

    def add_nodes(
        self,
        count: int,
        worker: str = "numpy",
        *,
        settings: Mapping[str, str] | None = None,
        token: str = "",
        kinds: Sequence[str] = (),
        owner_lines: str = "",
    ) -> list[NodeProcess]:
        """Let nodes join, with a token of the coordinator's unless there is another.

        Args:
            count: How many.
            worker: Kind of their workers.
            settings: Variables of their environment.
            token: What they join with.
            kinds: Kinds of work that their owner allows; empty: training alone.
            owner_lines: What their owner's file says beside that.
        """
        token = token or self.coordinator.node_token()
        new_nodes = [
            NodeProcess(self.folder, f"node-{len(self.nodes) + number}", worker, settings, kinds)
            for number in range(count)
        ]
        for node in new_nodes:
            if owner_lines:
                with (node.state_dir / "node.toml").open("a") as owner_file:
                    owner_file.write(owner_lines)
            node.join(token)
        self.nodes += new_nodes
        return new_nodes

    def client(self) -> Coordinator:
        """A connection with the operator's token."""
        return self.coordinator.client()

    def submit(self, spec: JobSpec) -> str:
        """A new job's id."""
        with self.client() as client:
            return client.submit(spec)

    def job(self, job_id: str) -> JobDetail:
        """The job as it is now."""
        with self.client() as client:
            return client.job(job_id)

    def events(self, job_id: str, from_sequence: int = 0) -> Iterator["Happening"]:
        """The job's events until it ends, across any number of restarts of the coordinator."""
        with self.client() as client:
            for update in client.watch(job_id, from_sequence):
                if isinstance(update, JobEvent):
                    yield Happening(update.sequence, update.kind, update.body)

    def wait_for(
        self, job_id: str, is_wanted: Callable[["Happening"], bool], from_sequence: int = 0
    ) -> "Happening":
        """The first event that is wanted."""
        for event in self.events(job_id, from_sequence):
            if is_wanted(event):
                return event
        raise AssertionError(f"{job_id} ended without the event; see {self.folder}")

    def wait_until_finished(self, job_id: str) -> JobView:
        """Follow the job to its end."""
        for _ in self.events(job_id):
            pass
        return self.job(job_id).job


class Happening(msgspec.Struct, frozen=True):
    """One journalled event."""

    sequence: int
    kind: str
    fields: dict[str, Any]


def accepted_updates(events: list[Happening]) -> list[tuple[int, NodeId, int]]:
    """Each accepted update as (round, node, lease)."""
    return [
        (event.fields["round"], event.fields["node"], event.fields["lease"])
        for event in events
        if event.kind == "UpdateReceived"
    ]


def failpoint_names() -> list[str]:
    """What `python -m coordinator --list-failpoints` prints."""
    process = subprocess.run(
        program("coordinator", "--list-failpoints"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **ENVIRONMENT},
    )
    return [line.partition("\t")[0] for line in process.stdout.splitlines()]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """A process's log, line by line."""
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


GONE_WITHIN_S = 60


def processes_in(folder: Path) -> list[psutil.Process]:
    """Living processes that were told to use a path in ``folder``."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def processes_left(folder: Path) -> list[psutil.Process]:
    """Those of them that stay; what was killed may take a moment to go."""
    psutil.wait_procs(processes_in(folder), timeout=GONE_WITHIN_S)
    return processes_in(folder)
