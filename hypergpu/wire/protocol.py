"""The protocol that this version speaks. Both sides of every call say theirs."""

from importlib.metadata import PackageNotFoundError, version

PROTOCOL = 1
"""Peers refuse any other."""
PROTOCOL_KEY = "hypergpu-protocol"
PROTOCOL_ENTRY = (PROTOCOL_KEY, str(PROTOCOL))
"""Metadata of every call."""


def _software() -> str:
    try:
        return f"hypergpu {version('hypergpu')}"
    except PackageNotFoundError:
        return "hypergpu (a source tree)"


SOFTWARE = _software()
"""What this program calls itself to peers and people."""
