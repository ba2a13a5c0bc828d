"""Node daemons as processes of this machine, each with a folder of its own."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hypergpu.command_line import program
from hypergpu.sites import Site
from hypergpu.user.cluster.children import ChildStart, OwnedProcesses
from hypergpu.wire.credentials import parse_token, token_text

_JOINED = "coordinator.json"
"""What a node's state folder holds from the node's join on."""
# Five workers on two cores: more threads than one each only wait for one another.
SHARED_MACHINE = {
    "HYPERGPU_NODE_WORKER_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # They would import torch beside each other, and keep those that work from it.
    "HYPERGPU_NODE_WORKER_SPARES": "0",
}


class NodePlace(msgspec.Struct, frozen=True):
    """Where nodes keep their state, what they train with, and over which lines."""

    folder: Path
    worker: str
    """``torch``, ``numpy`` or ``null``."""
    sites: Mapping[str, Site] = {}
    """Line of each node by name; without one it runs on this machine as it is."""


class LocalNodes:
    """The nodes of a cluster, by name."""

    def __init__(self, place: NodePlace, children: OwnedProcesses) -> None:
        self._place = place
        self._children = children
        self._tokens: dict[str, str] = {}
        self._environments: dict[str, Mapping[str, str]] = {}
        self._daemons: dict[str, subprocess.Popen[str]] = {}

    def state_of(self, name: str) -> Path:
        """A node's state folder, there or not."""
        return self._place.folder / name

    def join(self, text: str, address: str, nodes: Mapping[str, Mapping[str, str]]) -> None:
        """Let nodes join through one token, all at once.

        Args:
            text: The token.
            address: Where they dial; over a line, the line's end in place of its host.
            nodes: What each node's daemon gets in its environment, by name.
        """
        token = parse_token(text)
        port = address.rpartition(":")[2]
        for name, environment in nodes.items():
            site = self._place.sites.get(name)
            dialled_address = f"{site.dials}:{port}" if site else address
            self._environments[name] = environment
            self._tokens[name] = token_text(
                msgspec.structs.replace(token, addresses=(dialled_address,))
            )
            self._join_one(name)

    def kill(self, name: str) -> int:
        """SIGKILL a node's daemon and its worker; returns the daemon's process id."""
        return self._children.kill(self._daemons[name])

    def restart(self, name: str) -> int:
        """Start a killed node again from its state; returns the process id."""
        if not (self.state_of(name) / _JOINED).exists():
            return self._join_one(name)
        return self._start(name, program("gpu_node", "run", *self._arguments(name)), None)

    def replace(self, name: str, environment: Mapping[str, str]) -> int:
        """Kill a node and start it again with another environment; returns the process id."""
        self.kill(name)
        self._environments[name] = environment
        return self.restart(name)

    def dead(self) -> list[str]:
        """Nodes whose daemon has ended, by itself or killed."""
        return [name for name, child in self._daemons.items() if child.poll() is not None]

    def _arguments(self, name: str) -> list[str]:
        return ["--state-dir", str(self.state_of(name)), "--worker", self._place.worker]

    def _join_one(self, name: str) -> int:
        command = program("gpu_node", "join", "--token-file", "-", *self._arguments(name))
        return self._start(name, command, self._tokens[name])

    def _start(self, name: str, command: list[str], token: str | None) -> int:
        site = self._place.sites.get(name)
        how = ChildStart(
            site.command(command) if site else command,
            {**SHARED_MACHINE, "HYPERGPU_NODE_NAME": name, **self._environments[name]},
            secret=token,
        )
        self._daemons[name] = child = self._children.start(name, how)
        return child.pid
