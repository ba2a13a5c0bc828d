"""Congestion control of this process's own TCP sockets, asked of the kernel.

gRPC hides its sockets, but they are this process's: their descriptors can be copied and asked. Only
there does a congestion control that a route was given show.
"""

import contextlib
import os
import socket
from pathlib import Path

_NAME_BYTES = 16
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_DESCRIPTORS = Path("/proc/self/fd")
_DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_DESCRIPTORS_MAX = 4_096
"""Descriptors read for one answer."""


def congestion_control_on(port: int) -> str:
    """Congestion control of a connection to this process's ``port``; else the machine's default."""
    with contextlib.suppress(OSError):
        for number, descriptor in enumerate(os.listdir(_DESCRIPTORS)):  # noqa: PTH208  names only
            if number >= _DESCRIPTORS_MAX:
                break
            if name := _socket_congestion_control(int(descriptor), port):
                return name
    try:
        return _DEFAULT.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _socket_congestion_control(descriptor: int, port: int) -> str:
    """Its congestion control; empty when the descriptor is no connection to the port."""
    try:
        with _copy_socket(descriptor) as copy:
            if copy.type is not socket.SOCK_STREAM or copy.family not in _INTERNET:
                return ""
            if copy.getsockname()[1] != port:
                return ""
            copy.getpeername()
            name = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")


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
