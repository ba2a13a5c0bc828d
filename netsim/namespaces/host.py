"""A host in a namespace of its own: its name, where it is reached and how it is set up."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from netsim.error import NetsimError

COORDINATOR = "coordinator"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SETTINGS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    # What Linux gives most machines, and what the transfer model reckons with: one connection then
    # stops at some 250 Mbit/s when the RTT is 100 ms.
    "net/ipv4/tcp_wmem": "4096 16384 4194304",
    "net/ipv4/tcp_rmem": "4096 131072 6291456",
    # What one connection learnt about a path must not decide how the next one starts.
    "net/ipv4/tcp_no_metrics_save": "1",
}


class Host:
    """One end of a network: a name, an address and a namespace."""

    def __init__(self, name: str, address: str, namespace: str) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs this one inside; the process that it starts becomes it."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def require_names(nodes: Iterable[str]) -> None:
    """Refuse names that cannot be part of a namespace's, and the coordinator's own."""
    for name in nodes:
        if name == COORDINATOR:
            raise NetsimError("a node is named coordinator", "give it another name")
        if not NAME.fullmatch(name):
            fix = "use letters, digits, dots, dashes and underscores, at most 64"
            raise NetsimError(f"a node cannot be named {name!r}", fix)


def write_settings() -> None:
    """Set up the namespace that the caller has entered, as far as its kernel has such settings."""
    for name, value in SETTINGS.items():
        setting = Path("/proc/sys", name)
        if setting.exists():
            setting.write_text(value, "ascii")
