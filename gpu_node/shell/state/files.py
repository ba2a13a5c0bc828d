"""What a node must not forget, on disk: its memory, its nonce and whom it joined."""

import socket

import msgspec

from gpu_node.core.memory import Memory
from gpu_node.shell.state.places import Places
from gpu_node.shell.worker.messages import Ready
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.process.clock import unix_ms

_NONCES_RESERVED = 1000


class Coordinator(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the node dials, from its join."""

    address: str
    """``host:port`` of the listener for nodes."""
    is_plaintext: bool = False
    """No TLS, which only loopback allows."""
    certificate_life_s: int = 0
    """How long the certificate is good for, from when it was written."""


def load_memory(places: Places) -> Memory:
    """What the node remembers; nothing on the first start.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged. Forgetting silently could send work
        twice.
    """
    if not places.memory.exists():
        return Memory()
    try:
        return msgspec.json.decode(places.memory.read_bytes(), type=Memory)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        detail = f"{places.memory} is damaged: delete it with {places.jobs} to start fresh"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def save_memory(places: Places, memory: Memory) -> None:
    """Make the memory durable. Blocks."""
    write_durably(places.memory, msgspec.json.encode(memory))


def load_coordinator(places: Places) -> Coordinator | None:
    """Whom the node joined; None before the first join.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged.
    """
    if not places.coordinator.exists():
        return None
    try:
        return msgspec.json.decode(places.coordinator.read_bytes(), type=Coordinator)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        detail = f"{places.coordinator} is damaged: join again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def save_coordinator(places: Places, coordinator: Coordinator) -> None:
    """Remember whom the node joined. Blocks."""
    write_durably(places.coordinator, msgspec.json.encode(coordinator))


def kept_name(places: Places, given: str) -> str:
    """What the node is called: what is given, which is remembered; else what was. Blocks."""
    if given:
        write_durably(places.name, given.encode())
        return given
    try:
        return places.name.read_text("utf-8") or socket.gethostname()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()


def load_ready(places: Places, kind: str) -> Ready | None:
    """What a worker of this kind said it can do the last time; None when that is not known."""
    try:
        ready = msgspec.json.decode(places.worker.read_bytes(), type=Ready)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return ready if ready.kind == kind else None


def save_ready(places: Places, ready: Ready) -> None:
    """Remember what the worker can do. Blocks."""
    write_durably(places.worker, msgspec.json.encode(ready))


class Nonces:
    """Numbers above every one given before, also by earlier processes.

    They start at the time of day, so that a node whose file is lost is not refused for ever; from
    then on they only count, whatever the clock does. A range is reserved durably before its first
    number is given, so that most uploads wait for no disk.
    """

    def __init__(self, places: Places) -> None:
        self._path = places.nonce
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
