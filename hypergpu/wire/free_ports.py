"""Free ports of this machine, which no other caller gets meanwhile."""

import fcntl
import io
import itertools
import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import IO

_FIRST, _LAST = 20_000, 32_000
_LOOPBACK = "127.0.0.1"
# Wherever TMPDIR leads: the turn is of all processes.
_SHARED = Path("/tmp")  # noqa: S108


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody has now, TCP or UDP, at any address.

    The kernel gives them to no connection meanwhile, unless all below its own are taken. They are
    dealt out in turn to all processes of a user, so that none is given what another was given and
    does not listen at yet.
    """
    last = min(_LAST, _first_ephemeral() - 1)
    span = range(_FIRST, last + 1)
    if not span:
        return _ephemeral_ports(count)
    with _locked_turn() as turn:
        begin = _begin(turn.read()) % len(span)
        candidates = itertools.chain(span[begin:], span[:begin])
        ports = tuple(itertools.islice(filter(_is_free, candidates), count))
        if ports:
            turn.seek(0)
            turn.truncate()
            turn.write(str(ports[-1] + 1 - _FIRST).encode())
    return ports if len(ports) == count else _ephemeral_ports(count)


def _locked_turn() -> IO[bytes]:
    """Open and lock the file that holds the next port; an empty buffer where none can be shared."""
    path = _SHARED / f"hypergpu-ports-{os.getuid()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return io.BytesIO()
    turn = os.fdopen(descriptor, "r+b")
    fcntl.flock(turn, fcntl.LOCK_EX)
    return turn


def _begin(kept: bytes) -> int:
    try:
        return int(kept)
    except ValueError:
        return random.SystemRandom().randrange(_LAST)


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1


def _is_free(port: int) -> bool:
    """Whether it can be had at every address, which includes those that nodes dial."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True


def _ephemeral_ports(count: int) -> tuple[int, ...]:
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port_socket = stack.enter_context(socket.socket())
            port_socket.bind((_LOOPBACK, 0))
            ports.append(port_socket.getsockname()[1])
    return tuple(ports)
