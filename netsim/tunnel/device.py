"""TUN devices, and the requirements and settings of the host behind each."""

import fcntl
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from netsim.emulation.namespaces import (
    inside_namespace,
    require_namespaces,
    run_batch,
    write_settings,
)
from netsim.link import CongestionControl
from netsim.link.error import NetsimError
from netsim.tunnel.messages import TunnelPort

_TUN = Path("/dev/net/tun")
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_DEVICE = "tun0"
_NETWORK = "10.77.0.0/16"
_MTU_BYTES = 1500
# The kernel drops what it cannot queue for a reader; so much is 130 ms of 1 Gbit/s.
_WAITING_PACKETS = 10_000
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000


def require_tunnel() -> None:
    """Reject a machine on which the tunnel cannot be built, with what would help."""
    require_namespaces("the tunnel")
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        fix = f"give the container the device (--device {_TUN} --cap-add NET_ADMIN), or use the"
        fix = f"{fix} proxy, which needs nothing"
        raise NetsimError(f"{_TUN} cannot be opened: {error.strerror}", fix) from error


def require_controls(controls: Iterable[CongestionControl]) -> None:
    """Reject a congestion control that this kernel lacks."""
    present = CONTROLS.read_text("ascii").split()
    for control in sorted(set(controls)):
        if control not in present:
            raise NetsimError(
                f"this kernel has no congestion control {control} (it has {', '.join(present)})",
                f"load it (modprobe tcp_{control}) or choose one of these",
            )


def packed_address(text: str) -> bytes:
    """Return an address as it stands in a packet."""
    return bytes(int(part) for part in text.split("."))


def open_device(port: TunnelPort) -> int:
    """Make the device in the host's namespace and set the host up.

    Returns:
        The descriptor whose reads are packets from the host and whose writes are packets to it. The
        device lives as long as it is open.
    """
    with inside_namespace(port.namespace):
        descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        write_settings()
        run_batch(["ip"], _lines(port))
    return descriptor


def _lines(port: TunnelPort) -> list[str]:
    # In a namespace `sysctl net.ipv4.tcp_congestion_control` takes only what the machine's
    # administrator allowed to everybody; a route may always name one.
    route = f"dev {_DEVICE} proto kernel scope link src {port.address}"
    return [
        "link set lo up",
        f"link set {_DEVICE} mtu {_MTU_BYTES} txqueuelen {_WAITING_PACKETS} up",
        f"address add {port.address}/16 dev {_DEVICE}",
        f"route replace {_NETWORK} {route} congctl {port.shape.link.congestion_control}",
        *(f"route add {peer} {route} congctl {control}" for peer, control in port.peers),
    ]
