"""Bytes on their way: limits and goodput of bulk transfers, frames between processes,
standard streams, durable files, the clocks that time them, and the protocol's version.

Imported by `hypergpu --help`: nothing heavy is imported here.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Bytes, Microseconds, Milliseconds

if TYPE_CHECKING:
    import asyncio

    from _typeshed import ReadableBuffer


PROTOCOL = 6
"""Peers refuse any other. It rises with every change after which an older peer would be refused
later, or understood otherwise: of a message, or of the bytes that somebody signs."""
CHANGES = {
    2: "nodes sign contributions as EIP-712 data of their job's ledger",
    3: "receipts state the node's total score, there are no vouchers, and journals begin anew",
    4: "blobs move by HTTP, over the coordinator's bulk port",
    5: "they may move through an object store",
    6: "a job chooses its inner optimizer and what it clips",
}
"""Change that each protocol version brought."""
PROTOCOL_KEY = "hypergpu-protocol"
PROTOCOL_ENTRY = (PROTOCOL_KEY, str(PROTOCOL))
"""Metadata of every call."""


def version_text(program: str) -> str:
    """A program's name with the version of all of them."""
    try:
        return f"{program} {version('hypergpu')}"
    except PackageNotFoundError:
        return f"{program} (a source tree)"


SOFTWARE = version_text("hypergpu")
"""Name and version of this program for peers and people."""


def refuse_other_protocol(theirs: int, who: str, *, there: str, here: str) -> None:
    """Refuse a peer of another protocol.

    Args:
        theirs: That it speaks.
        who: It, for people.
        there: Where it runs, as the place to run a command.
        here: Where this program does.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with what changed and the command for the older side.
    """
    if theirs == PROTOCOL:
        return
    upgrade = f"run {there if theirs < PROTOCOL else here}: pip install --upgrade hypergpu"
    change = CHANGES.get(min(theirs, PROTOCOL) + 1, "")
    since = f" (since {min(theirs, PROTOCOL) + 1} {change})" if change else ""
    # Nodes log the detail alone: it must hold the command too.
    detail = f"{who} speaks protocol {theirs}, {SOFTWARE} speaks {PROTOCOL}{since}; {upgrade}"
    raise HyperGPUError(Reason.VERSION_MISMATCH, detail, fix=upgrade)


RANGE_BYTES_MIN = 10 << 10
"""A fresh TCP window carries as much at once (RFC 6928), headers and TLS included: of less, more
connections save no round trip.
"""
PIECE_BYTES = 64 << 10
"""Bytes that a slow link brings in time; a larger piece would arrive late."""


SLOWEST_BYTES_PER_S = 8 << 10
"""Slowest usable line, shared by all connections; transfers over a slower one are given up."""
_TIMES_SLOWER = 4
"""A piece may take this many times as long as the slowest one before it."""


def transfer_timeout_s(size_bytes: int, timeout_ms: Milliseconds, *, connections: int = 1) -> float:
    """Deadline of a bulk call: its share of the slowest line, and a small call's time."""
    return size_bytes * connections / SLOWEST_BYTES_PER_S + timeout_ms / 1000


class StallTimeout:
    """Time for which one stream may stall. A piece counts only once all of it has arrived.

    The first one may take as long as over the slowest line. From then on it is known how long
    pieces take: who brought them quickly is missed soon.
    """

    def __init__(self, piece_bytes: int, timeout_ms: Milliseconds, *, connections: int = 1) -> None:
        """``connections`` share the line, which carries at most so much in one piece."""
        self._piece_bytes = piece_bytes
        self._timeout_ms = timeout_ms
        self._connections = connections
        self._slowest_s: float | None = None

    def note_piece(self, took_s: float) -> None:
        """Record a piece that took this long after the one before it."""
        self._slowest_s = max(self._slowest_s or 0.0, took_s)

    def limit_s(self, left_bytes: int | None = None) -> float:
        """Return the time limit of the next piece, given the bytes left where they are known."""
        largest = self._piece_bytes
        piece_bytes = largest if left_bytes is None else min(largest, max(0, left_bytes))
        most_s = self.limit_of_s(piece_bytes)
        if self._slowest_s is None:
            return most_s
        return min(most_s, self._timeout_ms / 1000 + _TIMES_SLOWER * self._slowest_s)

    def limit_of_s(self, size_bytes: int) -> float:
        """Return the time that so many bytes may take over the slowest line."""
        return transfer_timeout_s(size_bytes, self._timeout_ms, connections=self._connections)


SMALLEST_BYTES = 16 << 10
"""Smallest transfer that measures a line; less fits into the first TCP window."""
STREAM_BYTES_MIN = 256 << 10
"""Least bytes after the first pieces; less may have waited in buffers."""
STREAM_US_MIN = 50_000
"""Least time from first to last piece; in less, a busy process may find all of them at once."""
SHORTEST_US = 1_000
"""Least time besides the round trip; less measures clocks and schedulers."""
_OF_ROUND_TRIP = 8
"""Round trips are known to an eighth of their value."""


class TransferredBytes(NamedTuple):
    """Bytes of a transfer, and the time the line took for them."""

    size_bytes: Bytes
    took_us: Microseconds


class GoodputMeter:
    """Measures one transfer at its receiver, over one stream or several that share the line.

    What each stream brings first was on its way, beside the others', before the clock started: only
    what comes after it counts.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._first_us = self._last_us = 0
        self._bytes = 0

    @property
    def last_us(self) -> int | None:
        """Arrival of the latest piece; None before the first."""
        return self._last_us if self._begun else None

    def add_piece(self, stream: int, size_bytes: int, now_us: int) -> None:
        """Count a piece that arrived."""
        if not self._begun:
            self._first_us = now_us
        if stream in self._begun:
            self._bytes += size_bytes
        self._begun.add(stream)
        self._last_us = now_us

    def transfer(self) -> TransferredBytes | None:
        """Return bytes and time from first to last piece; None when either is too small."""
        took_us = self._last_us - self._first_us
        if self._bytes < STREAM_BYTES_MIN or took_us < STREAM_US_MIN:
            return None
        return TransferredBytes(Bytes(self._bytes), Microseconds(took_us))


def moved_whole(size_bytes: int, took_us: int, round_trip_us: int) -> TransferredBytes | None:
    """Return a whole transfer without its round trip; None when it was too small to measure."""
    left_us = took_us - round_trip_us
    if size_bytes < SMALLEST_BYTES or left_us < max(SHORTEST_US, round_trip_us // _OF_ROUND_TRIP):
        return None
    return TransferredBytes(Bytes(size_bytes), Microseconds(left_us))


FRAME_BYTES_MAX = 16 << 20


class FrameError(Exception):
    """The stream does not hold whole frames: it broke off, or something else wrote to it."""


def frame(payload: bytes) -> bytes:
    """The bytes to write for one message."""
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameError(f"a message of {len(payload)} bytes is over the {FRAME_BYTES_MAX} allowed")
    return len(payload).to_bytes(4, "big") + payload


def _checked_size(head: bytes) -> int:
    size_bytes = int.from_bytes(head, "big")
    if size_bytes > FRAME_BYTES_MAX:
        raise FrameError(f"a frame announces {size_bytes} bytes: something else wrote to the pipe")
    return size_bytes


def read_frame(stream: BinaryIO) -> bytes | None:
    """Block for the next payload; None at a clean end of the stream.

    Raises:
        FrameError: The stream ended inside a frame, or a size is absurd.
    """
    head = stream.read(4)
    if not head:
        return None
    if len(head) < 4:
        raise FrameError("the stream ended inside a frame")
    size_bytes = _checked_size(head)
    payload = stream.read(size_bytes)
    if len(payload) < size_bytes:
        raise FrameError("the stream ended inside a frame")
    return payload


async def next_frame(reader: "asyncio.StreamReader") -> bytes | None:
    """`read_frame` for a pipe that asyncio owns."""
    from asyncio import IncompleteReadError  # a worker that must start fast has no use for it

    try:
        head = await reader.readexactly(4)
        return await reader.readexactly(_checked_size(head))
    except IncompleteReadError as broken:
        if broken.partial or broken.expected != 4:
            raise FrameError("the stream ended inside a frame") from broken
        return None


def monotonic_ms() -> Milliseconds:
    """Milliseconds since an arbitrary instant; never goes back while the process lives."""
    return Milliseconds(time.monotonic_ns() // 1_000_000)


def monotonic_us() -> Microseconds:
    """Microseconds since the same instant."""
    return Microseconds(time.monotonic_ns() // 1_000)


def unix_ms() -> Milliseconds:
    """Milliseconds since 1970 as this machine believes. The clock may be wrong and may jump."""
    return Milliseconds(time.time_ns() // 1_000_000)


def unix_s() -> int:
    """Seconds since 1970: for certificates and tokens only, never for jobs."""
    return int(time.time())


def prepare_streams() -> None:
    """Let a failure of standard output end in one sentence, and one of standard error in none.

    Streams that are closed are opened on the null device: otherwise the next file or socket gets
    their number, and what is printed goes there. Streams that a test replaced stay as they are.

    Raises:
        HyperGPUError: FILE_UNUSABLE, standard output is closed.
    """
    is_closed = sys.__stdout__ is None
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Guarded(2, _ignore), sys.stderr)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Guarded(1, _refuse), sys.stdout)
    if is_closed:
        raise _unusable("it is closed")


class _Guarded(io.FileIO):
    """A standard stream whose first failed write is handled and whose others vanish."""

    def __init__(self, number: int, on_failure: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._on_failure = on_failure

    def write(self, piece: "ReadableBuffer", /) -> int:
        try:
            return super().write(piece)
        except OSError as broken:
            if isinstance(broken, BrokenPipeError) and self.fileno() == 1:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self._on_failure(broken)
            return memoryview(piece).nbytes


def _refuse(broken: OSError) -> None:
    raise _unusable(str(broken.strerror)) from broken


def _ignore(broken: OSError) -> None:
    """There is nowhere left to say it."""


def _unusable(why: str) -> HyperGPUError:
    detail = f"standard output cannot be written: {why}"
    fix = "send it to a file with space left, or to /dev/null"
    return HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)


def _text(raw: _Guarded, former: TextIO | None) -> io.TextIOWrapper:
    """Text over a stream as Python makes it: by lines on terminals and on standard error."""
    encoding, errors = (former.encoding, former.errors) if former else ("utf-8", "replace")
    is_by_line = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=is_by_line)


PRIVATE = 0o600
"""Readable by its owner alone."""
SHARED = 0o666
"""Permissions as the user's umask sets them."""


def write_durably(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Write a file, replacing any other.

    Args:
        path: Its folder is there.
        content: All of it.
        mode: Who may read and write it, from its first byte on.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _naming(path), os.fdopen(os.open(beside, flags, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _take_place(beside, path)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the system, which tells none of those of a descriptor."""
    try:
        yield
    except OSError as broken:
        if broken.filename is None:
            broken.filename = str(path)
        raise


def _umask() -> int:
    """Permissions that this process's new files do not get."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:
        # Reading it changes it for a moment, for all threads.
        current = os.umask(0o077)
        os.umask(current)
        return current
    return int(status.partition("Umask:")[2].split(maxsplit=1)[0], 8)


def fill_durably(path: Path, fill: Callable[[Path], None], *, mode: int = PRIVATE) -> None:
    """Let ``fill`` make a file, which then takes the place of any other at ``path``.

    Args:
        path: Its folder is there.
        fill: Writes the file that it is given.
        mode: Who may read and write it in the end, as far as the user's umask allows.

    Raises:
        OSError: as `write_durably`.
    """
    beside = path.with_name(f".{path.name}.partial")
    # A link that somebody left there would have the content go elsewhere.
    beside.unlink(missing_ok=True)
    fill(beside)
    # Libraries make files with permissions of their own choice.
    beside.chmod(mode & ~_umask())
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    _take_place(beside, path)


def _take_place(beside: Path, path: Path) -> None:
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
