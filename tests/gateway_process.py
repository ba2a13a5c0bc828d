"""Real gateways before a real coordinator, as processes of this machine."""

import subprocess
from pathlib import Path

import msgspec
import psutil

from benchmarks.ours.demo.takeover import GatewayLine
from hypergpu.command_line import program
from hypergpu.user.cluster.processes import kill_group
from hypergpu.wire.credentials import parse_token, token_text
from tests.processes import ENVIRONMENT, CoordinatorProcess
from tests.program_forks import start_program

FREE_PORTS = ("--port", "0", "--node-port", "0", "--bulk-port", "0")


def operator_token(coordinator: CoordinatorProcess) -> str:
    """The token that a coordinator made at its first start."""
    return (coordinator.data_dir / "operator.token").read_text("utf-8").strip()


class GatewayProcess:
    """A gateway that has started and serves."""

    def __init__(self, token: str, log: Path, *flags: str) -> None:
        """Start one with an operator's token; without flags it takes free ports."""
        flags = flags or FREE_PORTS
        command = program("coordinator.shell.gateway", "--listen", "127.0.0.1", *flags)
        self.child: subprocess.Popen[str] = start_program(
            command, secret=token, log=log, is_read=True, environment=ENVIRONMENT
        )
        assert self.child.stdout is not None
        self.line = msgspec.json.decode(self.child.stdout.readline(), type=GatewayLine)

    @property
    def ports(self) -> tuple[str, ...]:
        """Flags of a gateway that shares its ports."""
        line = self.line
        port = line.address.rpartition(":")[2]
        port_flags = zip(FREE_PORTS[::2], (port, line.node_port, line.bulk_port), strict=True)
        return tuple(str(word) for pair in port_flags for word in pair)

    @property
    def node_address(self) -> str:
        """Where nodes with a certificate dial."""
        return f"127.0.0.1:{self.line.node_port}"

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
        node_token = parse_token(coordinator.node_token())
        return token_text(msgspec.structs.replace(node_token, addresses=(self.line.address,)))

    def end(self) -> None:
        """SIGKILL."""
        kill_group(self.child)
        if self.child.stdout is not None:
            self.child.stdout.close()
