"""A coordinator and its nodes as processes of this machine, all ended together."""

import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from hypergpu.client import ConnectionTarget, Coordinator
from hypergpu.cluster.leash import leash_command
from hypergpu.cluster.processes import exit_status, kill_group, program, start
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentSummary
from hypergpu.privacy import variables_of
from hypergpu.sites import Site, Sites
from hypergpu.terminal.output import note
from hypergpu.wire.credentials import Role, parse_token, split_address, token_text

CALL_TIMEOUT_S = 60.0


class ReadyLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints once it serves."""

    address: str
    """Where this machine reaches it."""
    operator_token_file: str
    node_port: int = 0
    """Port of nodes that have joined."""
    bulk_port: int = 0
    """Port of bulk bytes; 0: an object store carries them."""
    chain: PaymentSummary | None = None
    """None: no chain is configured."""


class RefusedLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints instead when it will not serve."""

    refused: str
    """The reason's name."""
    detail: str
    fix: str


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
    if within_s is None:
        return _read_ready(child)
    killer = threading.Timer(within_s, kill_group, [child])
    killer.daemon = True
    killer.start()
    try:
        return _read_ready(child)
    finally:
        killer.cancel()


def _read_ready(child: subprocess.Popen[str]) -> ReadyLine:
    lines = child.stdout or ()
    for line in lines:
        try:
            said = msgspec.json.decode(line)
            if isinstance(said, dict) and said.get("refused") in Reason.__members__:
                why = msgspec.convert(said, RefusedLine)
                raise StartRefusedError(Reason[why.refused], why.detail, fix=why.fix)
            if isinstance(said, dict) and "standing_by" in said:
                note(f"standing by: the coordinator at {said['standing_by']} drives")
                continue
            return msgspec.convert(said, ReadyLine)
        except (msgspec.DecodeError, msgspec.ValidationError):
            note(line.rstrip())
    status = exit_status(child)
    raise HyperGPUError(Reason.CHILD_ENDED, f"the coordinator ended with status {status}")


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


END_WITHIN_S = 5.0
READY_WITHIN_S = 120.0
_LOOPBACK = "127.0.0.1"
_JOINED = "coordinator.json"
"""What a node's state folder holds from the node's join on."""
# Five workers on two cores: more threads than one each only wait for one another.
ONE_THREAD = {"HYPERGPU_NODE_WORKER_THREADS": "1", "OMP_NUM_THREADS": "1"}


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
        self._folder = folder
        self._worker = worker
        self._settling = SettlingBy()
        self._keys: Mapping[str, str] = {}
        self._coordinator_site = sites.coordinator if sites else Site(dials=_LOOPBACK)
        self._node_sites = sites.nodes if sites else {}
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
        self._tokens: dict[str, str] = {}
        self._environments: dict[str, Mapping[str, str]] = {}
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self._coordinator: subprocess.Popen[str] | None = None
        self._all: list[subprocess.Popen[str]] = []
        self._ready: ReadyLine | None = None
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def logs(self) -> Path:
        """The folder with a log of each process."""
        return self._folder / "logs"

    def state_of(self, name: str) -> Path:
        """A node's state folder, there or not."""
        return self._folder / "state" / name

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
        child = start(
            leash_command(command),
            log=self._log("coordinator"),
            is_read=True,
            environment={
                **coordinators_secrets(),
                **self._settling.environment(),
                **self._keys,
            },
        )
        self._coordinator = child
        self._all.append(child)
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
        return self._ready_line

    def operator(self) -> Coordinator:
        """A connection with the operator's token."""
        return operator(self._ready_line)

    def start_nodes(self, nodes: Mapping[str, Mapping[str, str]]) -> None:
        """Let nodes join through one token, all at once.

        Args:
            nodes: What each node's daemon gets in its environment, by name.
        """
        # Without limits: a node killed before it has joined joins again. The coordinator's state
        # goes with the run.
        text = join_token(self._ready_line, ttl_s=0, uses=0, label="cluster")
        token = parse_token(text)
        for name, environment in nodes.items():
            self._environments[name] = environment
            dialled = msgspec.structs.replace(token, addresses=(self._dialled_address(name),))
            self._tokens[name] = token_text(dialled)
            self._join(name)

    def kill(self, name: str) -> int:
        """SIGKILL a node's daemon and its worker; returns the daemon's process id."""
        return self._kill_child(self._nodes[name])

    def restart(self, name: str) -> int:
        """Start a killed node again from its state; returns the process id."""
        if not (self.state_of(name) / _JOINED).exists():
            return self._join(name)
        return self._start_node(name, program("gpu_node", "run", *self._arguments(name)), None)

    def replace_node(self, name: str, environment: Mapping[str, str]) -> int:
        """Kill a node and start it again with another environment; returns the process id."""
        self.kill(name)
        self._environments[name] = environment
        return self.restart(name)

    def kill_coordinator(self) -> int:
        """SIGKILL the coordinator; returns its process id."""
        if self._coordinator is None:
            raise RuntimeError("start the coordinator first")
        return self._kill_child(self._coordinator)

    def dead(self) -> list[str]:
        """Nodes whose daemon has ended, and ``coordinator``: by itself or killed."""
        programs = {
            **self._nodes,
            **({"coordinator": self._coordinator} if self._coordinator else {}),
        }
        return [name for name, child in programs.items() if child.poll() is not None]

    @property
    def _ready_line(self) -> ReadyLine:
        if self._ready is None:
            raise RuntimeError("start the coordinator first")
        return self._ready

    def _dialled_address(self, name: str) -> str:
        """Where a node reaches the coordinator: over its own link."""
        site = self._node_sites.get(name)
        _, _, port = self._ready_line.address.rpartition(":")
        return f"{site.dials}:{port}" if site else self._ready_line.address

    def _arguments(self, name: str) -> list[str]:
        return ["--state-dir", str(self.state_of(name)), "--worker", self._worker]

    def _join(self, name: str) -> int:
        command = program("gpu_node", "join", "--token-file", "-", *self._arguments(name))
        return self._start_node(name, command, self._tokens[name])

    def _kill_child(self, child: subprocess.Popen[str]) -> int:
        """Kill once: when it is reaped its number may become somebody else's."""
        if child in self._all:
            kill_group(child)
            self._all.remove(child)
            if child.stdout is not None:
                child.stdout.close()
        return child.pid

    def _start_node(self, name: str, command: list[str], token: str | None) -> int:
        site = self._node_sites.get(name)
        child = start(
            leash_command(site.command(command) if site else command),
            secret=token,
            log=self._log(name),
            environment={**ONE_THREAD, "HYPERGPU_NODE_NAME": name, **self._environments[name]},
        )
        self._nodes[name] = child
        self._all.append(child)
        return child.pid

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

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
