"""A coordinator and its nodes as processes of this machine, all ended together."""

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentSummary
from hypergpu.privacy import variables_of
from hypergpu.sites import Site, Sites
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.user.cluster.children import ChildStart, OwnedProcesses
from hypergpu.user.cluster.nodes import LocalNodes, NodePlace
from hypergpu.user.cluster.processes import exit_status, kill_group
from hypergpu.user.terminal.output import note
from hypergpu.wire.credentials import Role, parse_token, split_address

CALL_TIMEOUT_S = 60.0


_Line = TypeVar("_Line", bound=msgspec.Struct)


class ReadyLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints once it serves."""

    address: str
    """Where this machine reaches it."""
    operator_token_file: str
    node_port: int = 0
    """Port of nodes that have joined."""
    bulk_port: int = 0
    """Port of bulk bytes; 0: an object store carries them."""
    metrics_port: int = 0
    """0: no metrics are served."""
    chain: PaymentSummary | None = None
    """None: no chain is configured."""


class RefusedLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints instead when it will not serve."""

    refused: str
    """The reason's name."""
    detail: str
    fix: str


class StandingByLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints while another one drives."""

    standing_by: str
    """Address of the one that drives."""


class StartRefusedError(HyperGPUError):
    """The coordinator said itself why it will not serve: its log adds nothing."""


class SettlingBy(msgspec.Struct, frozen=True):
    """How the payments package settles jobs; empty settings are its own."""

    chain: str = ""
    metering: str = ""
    retries_halted: bool = False
    """Whether halted transactions are tried again at this start."""

    def environment(self) -> dict[str, str]:
        """These settings as the coordinator's environment."""
        values = {
            "CHAIN": self.chain,
            "METERING": self.metering,
            "RETRY_PAYMENTS": "1" if self.retries_halted else "",
        }
        return {f"HYPERGPU_COORDINATOR_{name}": value for name, value in values.items() if value}


class Listen(msgspec.Struct, frozen=True):
    """Where a coordinator is to listen, and what it keeps."""

    data_dir: Path
    listen: str = ""
    port: int | None = None
    node_port: int | None = None
    bulk_port: int | None = None
    advertise: tuple[str, ...] = ()
    is_plaintext: bool = False
    blobs: str = ""
    """Address of an object store; empty: none."""


def coordinator_command(at: Listen) -> list[str]:
    """How the coordinator is started."""
    arguments = ["--data-dir", str(at.data_dir)]
    if at.listen:
        arguments += ["--listen", at.listen]
    if at.port is not None:
        arguments += ["--port", str(at.port)]
    if at.node_port is not None:
        arguments += ["--node-port", str(at.node_port)]
    if at.bulk_port is not None:
        arguments += ["--bulk-port", str(at.bulk_port)]
    if at.blobs:
        arguments += ["--blobs", at.blobs]
    for address in at.advertise:
        arguments += ["--advertise", address]
    if at.is_plaintext:
        arguments.append("--plaintext")
    return program("coordinator", *arguments)


def wait_until_ready(child: subprocess.Popen[str], within_s: float | None = None) -> ReadyLine:
    """Read the child's ready line.

    Args:
        child: The coordinator, whose stdout is read.
        within_s: It is killed when it says nothing for so long; None: people watch it themselves.

    Raises:
        StartRefusedError: it said why not.
        HyperGPUError: CHILD_ENDED, it ended, or was killed, before it was ready.
    """
    return read_line(child, ReadyLine, "the coordinator", within_s)


def read_line(
    child: subprocess.Popen[str], kind: type[_Line], name: str, within_s: float | None = None
) -> _Line:
    """Read a child's standard output until it prints a line of that kind.

    Args:
        child: A process whose stdout is read.
        kind: Form of the line.
        name: What it is called where it ends.
        within_s: As of `wait_until_ready`.

    Raises:
        StartRefusedError: It said why not.
        HyperGPUError: CHILD_ENDED, it ended, or was killed, before.
    """
    if within_s is None:
        return _read_line(child, kind, name)
    killer = threading.Timer(within_s, kill_group, [child])
    killer.daemon = True
    killer.start()
    try:
        return _read_line(child, kind, name)
    finally:
        killer.cancel()


def _read_line(child: subprocess.Popen[str], kind: type[_Line], name: str) -> _Line:
    lines = child.stdout or ()
    for line in lines:
        if (message := _line_of_kind(line, kind)) is not None:
            return message
        if (refusal := _line_of_kind(line, RefusedLine)) and refusal.refused in Reason.__members__:
            raise StartRefusedError(Reason[refusal.refused], refusal.detail, fix=refusal.fix)
        other = _line_of_kind(line, StandingByLine)
        drives = f"standing by: the coordinator at {other.standing_by} drives" if other else ""
        note(drives or line.rstrip())
    status = exit_status(child)
    raise HyperGPUError(Reason.CHILD_ENDED, f"{name} ended with status {status}")


def _line_of_kind(text: str, kind: type[_Line]) -> _Line | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def coordinators_secrets() -> dict[str, str]:
    """Our variables that a coordinator needs: its settings, and keys of stores and databases."""
    return variables_of("HYPERGPU_COORDINATOR_", "AWS_", "PG")


def operator(ready: ReadyLine) -> Coordinator:
    """A connection with the operator's token of this machine's coordinator."""
    token = parse_token(Path(ready.operator_token_file).read_text("utf-8"))
    return Coordinator(ConnectionTarget(ready.address, token, CALL_TIMEOUT_S))


def join_token(ready: ReadyLine, *, ttl_s: int, uses: int, label: str) -> str:
    """A fresh token for nodes."""
    with operator(ready) as coordinator:
        return coordinator.create_token(Role.NODE, ttl_s=ttl_s, uses=uses, label=label).token


READY_WITHIN_S = 120.0
_LOOPBACK = "127.0.0.1"


class LocalCluster:
    """Starts processes and owns them: leaving the block ends every one, whatever happened."""

    def __init__(
        self,
        folder: Path,
        worker: str,
        sites: Sites | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            folder: Gets state and logs.
            worker: ``torch``, ``numpy`` or ``null``.
            sites: Where everything runs; this machine as it is when nobody holds links open.
        """
        self.logs = folder / "logs"
        """The folder with a log of each process."""
        self._children = OwnedProcesses(self.logs)
        node_sites = sites.nodes if sites else {}
        self._nodes = LocalNodes(NodePlace(folder / "state", worker, node_sites), self._children)
        self._settling = SettlingBy()
        self._keys: Mapping[str, str] = {}
        self._coordinator_site = sites.coordinator if sites else Site(dials=_LOOPBACK)
        self._listen = Listen(
            data_dir=folder / "state" / "coordinator",
            listen=self._coordinator_site.dials,
            port=0,
            node_port=0,
            bulk_port=0,
            advertise=sites.addresses if sites else (),
        )
        if sites is not None:
            # Where nothing else listens the usual ports are free.
            port, node_port, bulk_port = sites.ports[:3] or (None, None, None)
            self._listen = msgspec.structs.replace(
                self._listen, port=port, node_port=node_port, bulk_port=bulk_port
            )
        self._coordinator: subprocess.Popen[str] | None = None
        self._ready: ReadyLine | None = None

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def state_of(self, name: str) -> Path:
        """A node's state folder, there or not."""
        return self._nodes.state_of(name)

    def use_object_store(self, address: str, keys: Mapping[str, str]) -> None:
        """Have bulk bytes go through an object store, of which nodes are told no key.

        Args:
            address: ``s3://BUCKET/PREFIX``.
            keys: Environment of the coordinator.
        """
        self._listen = msgspec.structs.replace(self._listen, blobs=address)
        self._keys = keys

    def start_coordinator(self, settling: SettlingBy | None = None) -> None:
        """Start it and wait until it serves; after a kill, on the ports it had.

        Args:
            settling: How jobs are paid from now on; None: as before, at first not at all.

        Raises:
            HyperGPUError: CHILD_ENDED, it did not come up.
        """
        self._settling = self._settling if settling is None else settling
        command = self._coordinator_site.command(coordinator_command(self._listen))
        secrets = {**coordinators_secrets(), **self._settling.environment(), **self._keys}
        child = self._children.start("coordinator", ChildStart(command, secrets, is_read=True))
        self._coordinator = child
        self._ready = wait_until_ready(child, READY_WITHIN_S)
        # Nodes dial where it was. The bulk port stands in each ticket.
        self._listen = msgspec.structs.replace(
            self._listen,
            port=split_address(self._ready.address)[1],
            node_port=self._ready.node_port,
        )

    @property
    def ready(self) -> ReadyLine:
        """The ready line of the coordinator."""
        if self._ready is None:
            raise RuntimeError("start the coordinator first")
        return self._ready

    def operator(self) -> Coordinator:
        """A connection with the operator's token."""
        return operator(self.ready)

    def start_nodes(self, nodes: Mapping[str, Mapping[str, str]]) -> None:
        """Let nodes join through one token, all at once.

        Args:
            nodes: What each node's daemon gets in its environment, by name.
        """
        # Without limits: a node killed before it has joined joins again. The coordinator's state
        # goes with the run.
        text = join_token(self.ready, ttl_s=0, uses=0, label="cluster")
        self._nodes.join(text, self.ready.address, nodes)

    def kill(self, name: str) -> int:
        """SIGKILL a node's daemon and its worker; returns the daemon's process id."""
        return self._nodes.kill(name)

    def restart(self, name: str) -> int:
        """Start a killed node again from its state; returns the process id."""
        return self._nodes.restart(name)

    def replace_node(self, name: str, environment: Mapping[str, str]) -> int:
        """Kill a node and start it again with another environment; returns the process id."""
        return self._nodes.replace(name, environment)

    def kill_coordinator(self) -> int:
        """SIGKILL the coordinator; returns its process id."""
        if self._coordinator is None:
            raise RuntimeError("start the coordinator first")
        return self._children.kill(self._coordinator)

    def dead(self) -> list[str]:
        """Nodes whose daemon has ended, and ``coordinator``: by itself or killed."""
        has_ended = self._coordinator is not None and self._coordinator.poll() is not None
        return [*self._nodes.dead(), *["coordinator"] * has_ended]

    def end(self) -> None:
        """Ask every process to end, then end those that have not."""
        self._children.end()
