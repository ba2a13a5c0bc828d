"""Ports of a process that serves by gRPC: their options, and the hosts that others dial.

Light, for a process that needs no journal.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Protocol

import grpc

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.keepalive import KEEPALIVE

MESSAGE_BYTES_MAX = 4 << 20
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9.])?", re.ASCII)
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 15_000),
    # Whoever says nothing is let go of: a port must not fill up with connections that do nothing.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.http2.bdp_probe", 0),
    # Two coordinators on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
)


def bound_port(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """Bind a server; returns the port.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE.
    """
    address = joined_address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise HyperGPUError(Reason.ADDRESS_UNUSABLE, f"{address} cannot be bound") from error


def joined_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether the address stands for every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def check_hosts(hosts: Iterable[str]) -> None:
    """Reject what nobody could dial, before tokens and the certificate name it.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, one is neither a name nor an address.
    """
    for host in hosts:
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            if not _HOST.fullmatch(host):
                detail = f"--advertise {host!r} is no host"
                fix = "give a name or an address without a port: --advertise gpu.example.org"
                raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail, fix=fix) from None


class HostSettings(Protocol):
    """Where a process listens."""

    @property
    def listen(self) -> str:
        """Address that its listeners bind."""

    @property
    def advertise(self) -> tuple[str, ...]:
        """Hosts that others dial; empty: to be found out."""


def dialled_hosts(settings: HostSettings) -> tuple[str, ...]:
    """Under which hosts the listeners can be reached, best first."""
    if settings.advertise:
        return settings.advertise
    if not is_wildcard(settings.listen):
        return (settings.listen,)
    return tuple(dict.fromkeys((*_outward_host(), "127.0.0.1")))


def _outward_host() -> tuple[str, ...]:
    """The address of the interface that leads to other machines; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a documentation address: only the route is looked up
        return (str(probe.getsockname()[0]),)
    return ()
