"""Two coordinators of which one stands by, two gateways that share an address, and nodes behind
them: what takes over from a machine that is lost, as processes of this machine.
"""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from hypergpu.command_line import program
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.user.cluster.children import ChildStart, OwnedProcesses
from hypergpu.user.cluster.cluster import (
    CALL_TIMEOUT_S,
    READY_WITHIN_S,
    Listen,
    ReadyLine,
    StandingByLine,
    coordinator_command,
    join_token,
    read_line,
    wait_until_ready,
)
from hypergpu.user.cluster.nodes import LocalNodes, NodePlace
from hypergpu.wire.credentials import Token, parse_token
from hypergpu.wire.free_ports import free_ports

GATEWAYS = 2
_NAMES = ("coordinator-1", "coordinator-2")
_LOOPBACK = "127.0.0.1"
_PASSPHRASE = "two words of a demo\n"
"""It opens keys that end with the folder, and lies beside them."""
HEARTBEAT_MS = 2_000


class GatewayLine(msgspec.Struct, frozen=True):
    """The line that a gateway prints once it serves."""

    address: str
    node_port: int
    bulk_port: int
    metrics_port: int = 0
    """0: no metrics are served."""


class SharedServices(NamedTuple):
    """What both coordinators go on from, and what else they are told."""

    blobs: str
    """Address of the object store."""
    environment: Mapping[str, str]
    """Variables of each coordinator: database, keys of the object store, engine, chain."""


class TakeoverCluster:
    """Starts processes and owns them: leaving the block ends every one, whatever happened."""

    def __init__(self, folder: Path, worker: str, services: SharedServices) -> None:
        """Nothing is started yet.

        Args:
            folder: Gets state and logs.
            worker: ``torch``, ``numpy`` or ``null``.
            services: They run already.
        """
        self._state = folder / "state"
        self.logs = folder / "logs"
        """The folder with a log of each process."""
        self._services = services
        self._children = OwnedProcesses(self.logs)
        self._nodes = LocalNodes(NodePlace(self._state, worker), self._children)
        self._listen = [self._place(name) for name in _NAMES]
        self._coordinators: dict[str, subprocess.Popen[str]] = {}
        self._gateways: dict[str, subprocess.Popen[str]] = {}
        self._address = ""
        self._token: Token | None = None
        self._ready: ReadyLine | None = None
        self._killed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._children.end()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where users reach the coordinators: the one that drives first, then the standby."""
        return tuple(f"{at.listen}:{at.port}" for at in self._listen)

    def start_coordinators(self) -> None:
        """Start one and wait until it serves; start the other and wait until it stands by.

        Raises:
            HyperGPUError: CHILD_ENDED, one did not come up.
        """
        self._state.mkdir(parents=True, exist_ok=True)
        self._passphrase.touch(mode=0o600)
        self._passphrase.write_text(_PASSPHRASE)
        self._ready = wait_until_ready(self._start_coordinator(0), READY_WITHIN_S)
        self._token = parse_token(Path(self._ready.operator_token_file).read_text("utf-8"))
        standby = self._start_coordinator(1)
        read_line(standby, StandingByLine, "the second coordinator", READY_WITHIN_S)

    def start_gateways(self) -> str:
        """Start gateways that share all ports; returns the address where nodes join.

        Raises:
            HyperGPUError: CHILD_ENDED, one did not come up.
        """
        ports = (0, 0, 0)
        for number in range(1, GATEWAYS + 1):
            line = self._start_gateway(f"gateway-{number}", ports)
            self._address = line.address
            ports = (int(line.address.rpartition(":")[2]), line.node_port, line.bulk_port)
        return self._address

    def start_nodes(self, nodes: Mapping[str, Mapping[str, str]]) -> None:
        """Let nodes join through the gateways, all at once.

        Args:
            nodes: What each node's daemon gets in its environment, by name.
        """
        text = join_token(self.ready, ttl_s=0, uses=0, label="cluster")
        self._nodes.join(text, self._address, nodes)

    @property
    def ready(self) -> ReadyLine:
        """The ready line of the coordinator that drives. After a kill it waits for the successor.

        Raises:
            HyperGPUError: CHILD_ENDED, that one did not come up.
        """
        if self._ready is None:
            if not self._killed:
                raise RuntimeError("start the coordinators first")
            self._ready = wait_until_ready(self._coordinators[_NAMES[1]], READY_WITHIN_S)
        return self._ready

    def operator(self) -> Coordinator:
        """A connection with the first operator's token to whichever coordinator drives."""
        if self._token is None:
            raise RuntimeError("start the coordinators first")
        address, *others = self.addresses
        target = ConnectionTarget(address, self._token, CALL_TIMEOUT_S, tuple(others))
        return Coordinator(target)

    def lose_active(self) -> int:
        """SIGKILL the coordinator that drives and delete its folder; returns its process id."""
        self._killed, self._ready = _NAMES[0], None
        process_id = self._children.kill(self._coordinators[self._killed])
        shutil.rmtree(self._listen[0].data_dir)
        return process_id

    def dead(self) -> list[str]:
        """Programs that have ended, but for the coordinator that was killed here."""
        programs = {**self._coordinators, **self._gateways}
        dead_names = [name for name, child in programs.items() if child.poll() is not None]
        return [*self._nodes.dead(), *(name for name in dead_names if name != self._killed)]

    @property
    def _passphrase(self) -> Path:
        return self._state / "passphrase"

    def _place(self, name: str) -> Listen:
        port, node_port = free_ports(2)
        return Listen(
            data_dir=self._state / name,
            listen=_LOOPBACK,
            port=port,
            node_port=node_port,
            bulk_port=0,
            blobs=self._services.blobs,
        )

    def _start_coordinator(self, place: int) -> "subprocess.Popen[str]":
        settings = {
            "HYPERGPU_COORDINATOR_TAKEOVER": "1",
            "HYPERGPU_COORDINATOR_PASSPHRASE_FILE": str(self._passphrase),
            "HYPERGPU_COORDINATOR_HEARTBEAT_INTERVAL_MS": str(HEARTBEAT_MS),
        }
        how = ChildStart(
            coordinator_command(self._listen[place]),
            {**settings, **self._services.environment},
            is_read=True,
        )
        name = _NAMES[place]
        self._coordinators[name] = child = self._children.start(name, how)
        return child

    def _start_gateway(self, name: str, ports: tuple[int, int, int]) -> GatewayLine:
        flags = zip(("--port", "--node-port", "--bulk-port"), map(str, ports), strict=True)
        words = ["--listen", _LOOPBACK, *(word for pair in flags for word in pair)]
        words += [word for each in self.addresses for word in ("--coordinator", each)]
        secret = Path(self.ready.operator_token_file).read_text("utf-8").strip()
        how = ChildStart(program("coordinator.shell.gateway", *words), secret=secret, is_read=True)
        self._gateways[name] = child = self._children.start(name, how)
        return read_line(child, GatewayLine, name, READY_WITHIN_S)
