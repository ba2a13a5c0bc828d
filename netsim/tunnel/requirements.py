"""What this machine must have before the first namespace is made."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from netsim.error import NetsimError
from netsim.link.link import CongestionControl

TUN = Path("/dev/net/tun")
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
INSTEAD = "or use the proxy, which needs nothing"


def require_machine() -> None:
    """Refuse a machine on which the tunnel cannot be built, with what would help."""
    if os.geteuid() != 0:
        raise NetsimError("the tunnel needs root for network namespaces", f"use sudo, {INSTEAD}")
    if shutil.which("ip") is None:
        fix = f"install iproute2 (apt-get install iproute2), {INSTEAD}"
        raise NetsimError("the program ip was not found", fix)
    try:
        os.close(os.open(TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        fix = f"give the container the device (--device {TUN} --cap-add NET_ADMIN), {INSTEAD}"
        raise NetsimError(f"{TUN} cannot be opened: {error.strerror}", fix) from error


def require_controls(controls: Iterable[CongestionControl]) -> None:
    """Refuse a congestion control that this kernel lacks."""
    present = CONTROLS.read_text("ascii").split()
    for control in sorted(set(controls)):
        if control not in present:
            raise NetsimError(
                f"this kernel has no congestion control {control} (it has {', '.join(present)})",
                f"load it (modprobe tcp_{control}) or ask for one of these",
            )
