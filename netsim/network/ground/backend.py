"""What may stand between the sites of a world."""

from enum import StrEnum


class Backend(StrEnum):
    """The ways to run real programs over links. The fourth way, virtual time, runs none."""

    PROXY = "proxy"
    """User-space forwarding on loopback: any Linux machine, no root."""
    TUNNEL = "tunnel"
    """Real packets through network namespaces and a user-space router: root and TUN."""
    TC = "tc"
    """Real packets through the kernel's own queues: root and a kernel that has them."""
