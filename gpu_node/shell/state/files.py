"""Files that outlive the daemon: its memory, its nonce and the coordinator that it joined."""

import socket

import msgspec

from gpu_node.core.end_states import Memory
from gpu_node.shell.state.paths import StatePaths
from gpu_node.shell.worker.messages import WorkerCapabilities
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.process.clock import unix_ms

_NONCES_RESERVED = 1000


class JoinedCoordinator(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator that the node dials, from its join."""

    address: str
    """``host:port`` of the listener for nodes."""
    is_plaintext: bool = False
    """No TLS, which only loopback allows."""
    certificate_life_s: int = 0
    """Life of the certificate, from when it was written."""


def load_memory(paths: StatePaths) -> Memory:
    """The memory; empty on the first start.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged. Forgetting silently could send work
        twice.
    """
    if not paths.memory.exists():
        return Memory()
    try:
        return msgspec.json.decode(paths.memory.read_bytes(), type=Memory)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        detail = f"{paths.memory} is damaged: delete it with {paths.jobs} to start fresh"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def save_memory(paths: StatePaths, memory: Memory) -> None:
    """Make the memory durable. Blocks."""
    write_durably(paths.memory, msgspec.json.encode(memory))


def load_coordinator(paths: StatePaths) -> JoinedCoordinator | None:
    """The coordinator that the node joined; None before the first join.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged.
    """
    if not paths.coordinator.exists():
        return None
    try:
        return msgspec.json.decode(paths.coordinator.read_bytes(), type=JoinedCoordinator)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        detail = f"{paths.coordinator} is damaged: join again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def save_coordinator(paths: StatePaths, coordinator: JoinedCoordinator) -> None:
    """Make the joined coordinator durable. Blocks."""
    write_durably(paths.coordinator, msgspec.json.encode(coordinator))


def node_name(paths: StatePaths, given: str) -> str:
    """The node's name: the given one, which is remembered, else the remembered one. Blocks."""
    if given:
        write_durably(paths.name, given.encode())
        return given
    try:
        return paths.name.read_text("utf-8") or socket.gethostname()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()


def load_capabilities(paths: StatePaths, kind: str) -> WorkerCapabilities | None:
    """Capabilities of the last worker of this kind; None where they are not known."""
    try:
        found = msgspec.json.decode(paths.worker.read_bytes(), type=WorkerCapabilities)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return found if found.kind == kind else None


def save_capabilities(paths: StatePaths, capabilities: WorkerCapabilities) -> None:
    """Remember the worker's capabilities. Blocks."""
    write_durably(paths.worker, msgspec.json.encode(capabilities))


class NonceCounter:
    """Numbers above every one given before, also by earlier processes.

    They start at the time of day, so that a node whose file is lost is not rejected for ever; then
    they only count up, whatever the clock does. A range is reserved durably before its first number
    is taken, so that most uploads wait for no disk.
    """

    def __init__(self, paths: StatePaths) -> None:
        self._path = paths.nonce
        self._next = 0
        self._reserved_below = 0

    def take(self) -> int:
        """The next number. Blocks when a range is used up."""
        if self._next >= self._reserved_below:
            self._next = max(self._stored_nonce(), unix_ms())
            self._reserved_below = self._next + _NONCES_RESERVED
            write_durably(self._path, str(self._reserved_below).encode())
        nonce, self._next = self._next, self._next + 1
        return nonce

    def _stored_nonce(self) -> int:
        try:
            return int(self._path.read_text("ascii"))
        except (OSError, ValueError):
            return 1
