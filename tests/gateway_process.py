"""Real gateways before a real coordinator, as processes of this machine."""

import subprocess
from pathlib import Path

import msgspec
import psutil

from hypergpu.cluster.processes import kill_group, program, start
from hypergpu.wire.credentials import parse_token, token_text
from tests.processes import ENVIRONMENT, CoordinatorProcess


class GatewayLine(msgspec.Struct, frozen=True):
    """The line that a gateway prints once it serves."""

    address: str
    node_port: int
    bulk_port: int


class GatewayProcess:
    """A gateway that has started and serves."""

    def __init__(
        self, coordinator: CoordinatorProcess, log: Path, like: "GatewayProcess | None" = None
    ) -> None:
        """Start one before a coordinator; it shares the ports of ``like``."""
        ports = like.ports if like is not None else ("0", "0", "0")
        names = ("--port", "--node-port", "--bulk-port")
        flags = [word for name, port in zip(names, ports, strict=True) for word in (name, port)]
        command = program("coordinator.shell.gateway", "--listen", "127.0.0.1", *flags)
        token = (coordinator.data_dir / "operator.token").read_text("utf-8").strip()
        self.child: subprocess.Popen[str] = start(
            command, secret=token, log=log, is_read=True, environment=ENVIRONMENT
        )
        assert self.child.stdout is not None
        self.line = msgspec.json.decode(self.child.stdout.readline(), type=GatewayLine)

    @property
    def ports(self) -> tuple[str, str, str]:
        """Its ports, as flags name them."""
        line = self.line
        return line.address.rpartition(":")[2], str(line.node_port), str(line.bulk_port)

    @property
    def nodes(self) -> int:
        """Connections of nodes that it holds."""
        connections = psutil.Process(self.child.pid).net_connections("tcp")
        return sum(
            each.laddr.port == self.line.node_port and each.status == psutil.CONN_ESTABLISHED
            for each in connections
        )

    def token(self, coordinator: CoordinatorProcess) -> str:
        """A join token that names this gateway in place of its coordinator."""
        found = parse_token(coordinator.node_token())
        return token_text(msgspec.structs.replace(found, addresses=(self.line.address,)))

    def end(self) -> None:
        """SIGKILL."""
        kill_group(self.child)
        if self.child.stdout is not None:
            self.child.stdout.close()
