"""Congestion controls of this machine's kernel, and the route that one is set on."""

import ipaddress
import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

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
    modules = (_MODULES / release).glob("kernel/net/ipv4/tcp_bbr.ko*")
    return Controls(
        default=_setting("tcp_congestion_control"),
        available=tuple(_setting("tcp_available_congestion_control").split()),
        is_bbr_loadable=any(modules),
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
    process = ip(address, "get", address)
    route = _first(process.stdout)
    if process.returncode or not route.get("dev"):
        return None
    metrics = [each for each in route.get("metrics", ()) if isinstance(each, dict)]
    control_names = [str(each["congestion"]) for each in metrics if "congestion" in each]
    kept_metrics = [
        (name, each[name]) for each in metrics for name in _KEPT_METRICS if name in each
    ]
    return RouteSettings(
        address=address,
        device=str(route["dev"]),
        gateway=str(route.get("gateway", "")),
        source=str(route.get("prefsrc", "")),
        congestion_control=control_names[0] if control_names else "",
        is_local=route.get("type") == "local",
        metrics=tuple(word for name, value in kept_metrics for word in (name, str(value))),
        is_foreign="via" in route,
    )


def _first(text: str) -> dict[str, Any]:
    try:
        routes = json.loads(text)
    except ValueError:
        return {}
    is_one = isinstance(routes, list) and routes and isinstance(routes[0], dict)
    return routes[0] if is_one else {}
