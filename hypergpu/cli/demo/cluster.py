"""A coordinator and its nodes as processes of this machine, all ended together."""

import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

import msgspec

from hypergpu.cli.machine.children import kill_group, program, start
from hypergpu.cli.machine.up import (
    Listen,
    Ready,
    coordinator_command,
    join_token,
    operator,
    wait_until_ready,
)
from hypergpu.cli.remote.calls import Coordinator
from hypergpu.sites import Site, Sites
from hypergpu.token import parse_token, token_text

END_WITHIN_S = 5.0
LOOPBACK = "127.0.0.1"
# Five workers on two cores: more threads than one each only wait for one another.
ONE_THREAD = {"HYPERGPU_NODE_WORKER_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Cluster:
    """Starts processes and owns them: leaving the block ends every one, whatever happened."""

    def __init__(self, folder: Path, worker: str, sites: Sites | None = None) -> None:
        """Nothing is started yet.

        Args:
            folder: Gets state and logs.
            worker: ``torch``, ``numpy`` or ``null``.
            sites: Where everything runs; this machine as it is when nobody holds links open.
        """
        self._folder = folder
        self._worker = worker
        self._coordinator_site = sites.coordinator if sites else Site(dials=LOOPBACK)
        self._node_sites = dict(sites.nodes) if sites else {}
        self._ports = sites.ports if sites else ()
        self._addresses = sites.addresses if sites else ()
        self._nodes: dict[int, subprocess.Popen[str]] = {}
        self._all: list[subprocess.Popen[str]] = []
        self._ready: Ready | None = None
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start_coordinator(self) -> None:
        """Start it on free ports of loopback and wait until it serves.

        Raises:
            RefusalError: CHILD_ENDED, it did not come up.
        """
        port, node_port = self._ports[:2] or (0, 0)
        at = Listen(
            data_dir=self._folder / "state" / "coordinator",
            listen=self._coordinator_site.dials,
            port=port,
            node_port=node_port,
            advertise=self._addresses,
        )
        command = self._coordinator_site.command(coordinator_command(at))
        child = start(command, log=self._log("coordinator"), is_read=True)
        self._all.append(child)
        self._ready = wait_until_ready(child)

    def operator(self) -> Coordinator:
        """A connection with the operator's token."""
        if self._ready is None:
            raise RuntimeError("start the coordinator first")
        return operator(self._ready)

    def start_nodes(self, count: int) -> None:
        """Let ``count`` nodes join through one token, all at once."""
        if self._ready is None:
            raise RuntimeError("start the coordinator first")
        token = parse_token(join_token(self._ready, ttl_s=600, uses=count, label="demo"))
        for number in range(1, count + 1):
            command = program("gpu_node", "join", "--token-file", "-", *self._arguments(number))
            dialled = msgspec.structs.replace(token, addresses=(self._dialled(number),))
            self._start_node(number, command, token_text(dialled))

    def _dialled(self, number: int) -> str:
        """Where a node reaches the coordinator: over its own link."""
        if self._ready is None:
            raise RuntimeError("start the coordinator first")
        _, _, port = self._ready.address.rpartition(":")
        site = self._node_sites.get(self._name(number))
        return f"{site.dials}:{port}" if site else self._ready.address

    def _name(self, number: int) -> str:
        names = list(self._node_sites)
        return names[number - 1] if number <= len(names) else f"node-{number}"

    def kill(self, number: int) -> int:
        """SIGKILL a node's daemon and its worker; returns the daemon's process id."""
        child = self._nodes[number]
        kill_group(child)
        return child.pid

    def restart(self, number: int) -> int:
        """Start a killed node again from its state; returns the process id."""
        command = program("gpu_node", "run", *self._arguments(number))
        return self._start_node(number, command, None)

    def dead(self) -> list[int]:
        """Nodes whose daemon has ended by itself."""
        return [number for number, child in self._nodes.items() if child.poll() is not None]

    def _arguments(self, number: int) -> list[str]:
        state_dir = self._folder / "state" / f"node-{number}"
        return ["--state-dir", str(state_dir), "--worker", self._worker]

    def _start_node(self, number: int, command: list[str], token: str | None) -> int:
        log = self._log(f"node-{number}")
        name = self._name(number)
        site = self._node_sites.get(name)
        environment = {**ONE_THREAD, "HYPERGPU_NODE_NAME": name}
        at_site = site.command(command) if site else command
        child = start(at_site, secret=token, log=log, environment=environment)
        self._nodes[number] = child
        self._all.append(child)
        return child.pid

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def end(self) -> None:
        """Ask every process to end, then end those that have not."""
        living = [child for child in self._all if child.poll() is None]
        # The second SIGTERM stops a daemon at once: nothing here is worth draining.
        for _ in range(2):
            for child in living:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
        give_up_at_s = time.monotonic() + END_WITHIN_S
        for child in living:
            try:
                child.wait(max(0.0, give_up_at_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        for child in self._all:
            kill_group(child)
            if child.stdout is not None:
                child.stdout.close()
