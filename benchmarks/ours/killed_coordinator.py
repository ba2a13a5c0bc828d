"""A coordinator that is killed and started again on the same ports and journal."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ours.cluster import LOOPBACK, ONE_THREAD
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import Listen, coordinator_command, operator, wait_until_ready
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.wire.free_ports import free_ports


class KilledCoordinator:
    """A coordinator that is killed and started again on the same ports.

    Args:
        folder: Holds what it keeps, and its log.
        options: More options of `hypergpu-coordinator`.
    """

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self._options = options
        port, node_port, bulk_port = free_ports(3)
        self._at = Listen(
            data_dir=folder / "coordinator",
            listen=LOOPBACK,
            port=port,
            node_port=node_port,
            bulk_port=bulk_port,
            is_plaintext=True,
        )
        self._log = folder / "coordinator.log"
        self._child: subprocess.Popen[str] | None = None
        self.kills = 0

    def start(self) -> None:
        """Start it, and wait until it serves."""
        environment = {**ONE_THREAD, "HYPERGPU_CHAIN": "none"}
        command = [*coordinator_command(self._at), *self._options]
        self._child = start(command, log=self._log, is_read=True, environment=environment)
        self.ready = wait_until_ready(self._child)

    def kill(self) -> None:
        """SIGKILL it."""
        if self._child is not None:
            kill_group(self._child)
            if self._child.stdout is not None:
                self._child.stdout.close()
            self._child = None

    @property
    def child(self) -> "subprocess.Popen[str]":
        """Its process, while it runs."""
        if self._child is None:
            raise RuntimeError("it is not running")
        return self._child

    def client(self) -> Coordinator:
        """A connection with the operator's token."""
        return operator(self.ready)

    @property
    def node_address(self) -> str:
        """Where nodes dial."""
        return f"{LOOPBACK}:{self._at.node_port}"
