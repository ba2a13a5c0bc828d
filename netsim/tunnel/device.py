"""TUN devices and the settings of the host behind each: what a packet meets before our router."""

import fcntl
import os
import struct

import msgspec

from netsim.link.link import CongestionControl
from netsim.namespaces import namespaces
from netsim.namespaces.host import write_settings
from netsim.tunnel.requirements import TUN

DEVICE = "tun0"
NETWORK = "10.77.0.0/16"
MTU_BYTES = 1500
# The kernel drops what it cannot queue for a reader; so much is 130 ms of 1 Gbit/s.
WAITING_PACKETS = 10_000

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What is set up in one namespace."""

    namespace: str
    address: str
    congestion_control: CongestionControl
    peers: tuple[tuple[str, CongestionControl], ...] = ()
    """Addresses that are reached with another congestion control than the rest."""


def address(number: int) -> str:
    """Return the address of the host with this number; 1 is the coordinator's."""
    return f"10.77.{number >> 8}.{number & 255}"


def packed(text: str) -> bytes:
    """Return an address as it stands in a packet."""
    return bytes(int(part) for part in text.split("."))


def opened(host: Host) -> int:
    """Make the device in the host's namespace and set the host up.

    Returns:
        The descriptor whose reads are packets from the host and whose writes are packets to it. The
        device lives as long as it is open.
    """
    with namespaces.entered(host.namespace):
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(descriptor, TUNSETIFF, request)
        write_settings()
        namespaces.ip_batch(_lines(host))
    return descriptor


def _lines(host: Host) -> list[str]:
    # In a namespace `sysctl net.ipv4.tcp_congestion_control` takes only what the machine's
    # administrator allowed to everybody; a route may always name one.
    route = f"dev {DEVICE} proto kernel scope link src {host.address}"
    return [
        "link set lo up",
        f"link set {DEVICE} mtu {MTU_BYTES} txqueuelen {WAITING_PACKETS} up",
        f"address add {host.address}/16 dev {DEVICE}",
        f"route replace {NETWORK} {route} congctl {host.congestion_control}",
        *(f"route add {peer} {route} congctl {control}" for peer, control in host.peers),
    ]
