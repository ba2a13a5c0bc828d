"""A coordinator and its nodes as processes on loopback, ended together."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from hypergpu.command_line import program
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import (
    Listen,
    ReadyLine,
    coordinator_command,
    operator,
    wait_until_ready,
)
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.wire.credentials import Role

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""As the peers' processes are started: more threads than cores wait for one another."""
LOOPBACK = "127.0.0.1"


class BenchmarkError(Exception):
    """What was to be measured did not happen; the text says what, and where the logs lie."""


class Running(NamedTuple):
    """A coordinator that serves."""

    folder: Path
    ready: ReadyLine
    coordinator: "subprocess.Popen[str]"
    owner: ExitStack

    def client(self) -> Coordinator:
        """A connection with the operator's token."""
        return operator(self.ready)

    def node_token(self) -> str:
        """A token that any number of nodes may join with."""
        with self.client() as client:
            return client.create_token(Role.NODE, ttl_s=3600, uses=0, label="benchmark").token

    def add_nodes(
        self, count: int, worker: str, *, token: str = ""
    ) -> "list[subprocess.Popen[str]]":
        """Let daemons join, a process each, with a token that names other addresses if need be."""
        token = token or self.node_token()
        return [self._node(f"node-{number}", worker, token) for number in range(count)]

    def _node(self, name: str, worker: str, token: str) -> "subprocess.Popen[str]":
        arguments = ("--state-dir", str(self.folder / name), "--worker", worker)
        command = program("gpu_node", "join", "--token-file", "-", *arguments)
        log = self.folder / f"{name}.log"
        child = start(command, secret=token, log=log, environment=ONE_THREAD)
        self.owner.callback(kill_group, child)
        return child


@contextmanager
def running(
    folder: Path,
    *,
    is_plaintext: bool,
    node_port: int = 0,
    bulk_port: int = 0,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start a coordinator; it and all its nodes end with the block.

    Args:
        folder: Holds everything that they keep, and their logs.
        is_plaintext: Without TLS.
        node_port: Where nodes dial; 0: a free port.
        bulk_port: Where they fetch; 0: a free port.
        settings: Of the coordinator, as variables of its environment.
    """
    at = Listen(
        data_dir=folder / "coordinator",
        listen=LOOPBACK,
        port=0,
        node_port=node_port,
        bulk_port=bulk_port,
        is_plaintext=is_plaintext,
    )
    log = folder / "coordinator.log"
    with ExitStack() as owner:
        environment = {**ONE_THREAD, **(settings or {})}
        child = start(coordinator_command(at), log=log, is_read=True, environment=environment)
        owner.callback(_end, child)
        yield Running(folder, wait_until_ready(child), child, owner)


def _end(child: "subprocess.Popen[str]") -> None:
    kill_group(child)
    if child.stdout is not None:
        child.stdout.close()
