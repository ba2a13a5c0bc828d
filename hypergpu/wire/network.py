"""The network of this machine as its kernel tells it: congestion control, counters of TCP
connections, free ports; and the datagrams that measure losses.

Counters of the kernel about this process's TCP connections.

gRPC hides its sockets, but their descriptors can be copied and read. They carry the real transfers,
so their retransmissions say what an idle socket of our own could not. Only there does a congestion
control that a route was given show.
"""

import fcntl
import io
import ipaddress
import itertools
import json
import os
import random
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

BBR = "bbr"
FOR_ALL = f"sysctl -w net.ipv4.tcp_congestion_control={BBR}"
"""Gives BBR to all new connections of a machine."""
WITHOUT = "use a kernel with tcp_bbr: Linux 4.9 or later, its modules installed"
_SETTINGS = Path("/proc/sys/net/ipv4")
_MODULES = Path("/lib/modules")
_IP_TIMEOUT_S = 20.0
_KEPT_METRICS = ("mtu", "advmss", "initcwnd", "initrwnd")
"""Settings that a route copies from the route it overrides."""


class Controls(NamedTuple):
    """Congestion controls of a kernel; all fields are empty where they are unknown."""

    default: str
    """Congestion control of connections whose route names none."""
    available: tuple[str, ...]
    """Loaded congestion controls."""
    is_bbr_loadable: bool
    """Whether a module for it lies on the disk."""

    @property
    def loading(self) -> str:
        """The command that makes BBR available; empty when it is, or no command does."""
        is_missing = BBR not in self.available
        return "modprobe tcp_bbr" if is_missing and self.is_bbr_loadable else ""

    @property
    def has_bbr(self) -> bool:
        """Whether it is available, or can be made so."""
        return BBR in self.available or self.is_bbr_loadable

    def after_loading(self, command: str) -> str:
        """A command, behind the one that loads BBR where that is needed."""
        return f"{self.loading} && {command}" if self.loading else command


class RouteSettings(NamedTuple):
    """How packets get to an address."""

    address: str
    device: str
    gateway: str
    """Empty: it is on the same network."""
    source: str
    congestion_control: str
    """Congestion control of this route; empty: the kernel's default."""
    is_local: bool
    """It is an address of this machine."""
    metrics: tuple[str, ...] = ()
    """Other settings of this route, as `ip` takes them: ``mtu 1400``."""
    is_foreign: bool = False
    """Its next hop is an address of the other family, which `route` does not write."""

    @property
    def destination(self) -> str:
        """A route to this address alone."""
        return f"{self.address}/{ipaddress.ip_address(self.address).max_prefixlen}"

    def route(self, control: str) -> list[str]:
        """What `ip route add` takes for the same way with a congestion control of its own."""
        via = ["via", self.gateway] if self.gateway else []
        source = ["src", self.source] if self.source else []
        metrics = [*self.metrics, "congctl", control]
        return [self.destination, *via, "dev", self.device, *source, *metrics]


def controls() -> Controls:
    """Ask this machine's kernel."""
    release = os.uname().release
    found = (_MODULES / release).glob("kernel/net/ipv4/tcp_bbr.ko*")
    return Controls(
        default=_setting("tcp_congestion_control"),
        available=tuple(_setting("tcp_available_congestion_control").split()),
        is_bbr_loadable=any(found),
    )


def _setting(name: str) -> str:
    try:
        return (_SETTINGS / name).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def ip(address: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `ip` on routes of an address's family. Blocks.

    Raises:
        OSError: It is not installed, or does not answer (`TimeoutError`).
    """
    family = f"-{ipaddress.ip_address(address).version}"
    command = ["ip", family, "-json", "route", *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_IP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError("ip did not answer") from None


def way_to(address: str) -> RouteSettings | None:
    """Return the route of packets that leave now; None without one. Blocks.

    Raises:
        OSError: As `ip`.
    """
    told = ip(address, "get", address)
    found = _first(told.stdout)
    if told.returncode or not found.get("dev"):
        return None
    metrics = [each for each in found.get("metrics", ()) if isinstance(each, dict)]
    named = [str(each["congestion"]) for each in metrics if "congestion" in each]
    kept = [(name, each[name]) for each in metrics for name in _KEPT_METRICS if name in each]
    return RouteSettings(
        address=address,
        device=str(found["dev"]),
        gateway=str(found.get("gateway", "")),
        source=str(found.get("prefsrc", "")),
        congestion_control=named[0] if named else "",
        is_local=found.get("type") == "local",
        metrics=tuple(word for name, value in kept for word in (name, str(value))),
        is_foreign="via" in found,
    )


def _first(text: str) -> dict[str, Any]:
    try:
        routes = json.loads(text)
    except ValueError:
        return {}
    is_one = isinstance(routes, list) and routes and isinstance(routes[0], dict)
    return routes[0] if is_one else {}


_DESCRIPTORS = Path("/proc/self/fd")
_DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_DESCRIPTORS_MAX = 4_096
_NAME_BYTES = 16
# struct tcp_info of linux/tcp.h: total_retrans and data_segs_out, there since Linux 4.6.
_RETRANSMITTED = struct.Struct("=100xI")
_SEGMENTS_OUT = struct.Struct("=156xI")
_INFO_BYTES = 160
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class TcpConnection(NamedTuple):
    """One connection as the kernel counts it."""

    local_port: int
    congestion_control: str
    segments: int
    """Segments with data sent so far, retransmissions included; 0 on older kernels."""
    retransmitted: int


def connections_on(port: int) -> Iterator[TcpConnection]:
    """This process's connections with the port at either end; none where there is no /proc."""
    try:
        # Listed at once: copies open descriptors of their own meanwhile.
        descriptors = os.listdir(_DESCRIPTORS)[:_DESCRIPTORS_MAX]  # noqa: PTH208  names only
    except OSError:
        return
    for descriptor in descriptors:
        if (found := _read_counts(int(descriptor), port)) is not None:
            yield found


def congestion_control_on(port: int) -> str:
    """Congestion control of a connection to the port, which a route may set; else the default."""
    for connection in connections_on(port):
        return connection.congestion_control
    try:
        return _DEFAULT.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_counts(descriptor: int, port: int) -> TcpConnection | None:
    try:
        with _copy_socket(descriptor) as copy:
            if copy.type is not socket.SOCK_STREAM or copy.family not in _INTERNET:
                return None
            local_port = int(copy.getsockname()[1])
            if port not in (local_port, copy.getpeername()[1]):
                return None
            name = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
            counters = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    text = name.partition(b"\0")[0].decode("ascii", "replace")
    if len(counters) < _INFO_BYTES:
        return TcpConnection(local_port, text, 0, 0)
    (retransmitted,) = _RETRANSMITTED.unpack_from(counters)
    (segments,) = _SEGMENTS_OUT.unpack_from(counters)
    return TcpConnection(local_port, text, segments, retransmitted)


def _copy_socket(descriptor: int) -> socket.socket:
    """A copy, since gRPC may close its own any moment.

    Raises:
        OSError: It is closed already, or no socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


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
        found = tuple(itertools.islice(filter(_is_free, candidates), count))
        if found:
            turn.seek(0)
            turn.truncate()
            turn.write(str(found[-1] + 1 - _FIRST).encode())
    return found if len(found) == count else _ephemeral_ports(count)


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
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            taken = held.enter_context(socket.socket())
            taken.bind((_LOOPBACK, 0))
            ports.append(taken.getsockname()[1])
    return tuple(ports)


DATAGRAM_BYTES = 200
"""Size of each datagram; any other size is dropped."""
TOKEN_BYTES = 45
PACKETS_MAX = 1_000
"""Most packets of one train in a report."""
_NUMBERS = struct.Struct(">IH")


class Numbers(NamedTuple):
    """Numbers of a train and of a packet in it."""

    train: int
    packet: int


def datagram(token: bytes, numbers: Numbers) -> bytes:
    """Return a packet of a train."""
    head = token + _NUMBERS.pack(numbers.train & 0xFFFFFFFF, numbers.packet)
    return head.ljust(DATAGRAM_BYTES, b"\0")


def numbers_of(echo: bytes, token: bytes) -> Numbers | None:
    """Return the numbers of an echoed packet; None when it has another token."""
    if len(echo) != DATAGRAM_BYTES or not echo.startswith(token):
        return None
    return Numbers(*_NUMBERS.unpack_from(echo, len(token)))
