"""Counters of the kernel about this process's TCP connections.

gRPC hides its sockets, but their descriptors can be copied and read. They carry the real transfers,
so their retransmissions say what an idle socket of our own could not. Only there does a congestion
control that a route was given show.
"""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
        if (connection := _read_counts(int(descriptor), port)) is not None:
            yield connection


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
    (retransmitted_segments,) = _RETRANSMITTED.unpack_from(counters)
    (segments,) = _SEGMENTS_OUT.unpack_from(counters)
    return TcpConnection(local_port, text, segments, retransmitted_segments)


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
