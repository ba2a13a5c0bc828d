"""Versions that peers and this coordinator state to each other."""

from hypergpu.protocol import PROTOCOL, SOFTWARE, refuse_other_protocol
from hypergpu.v1 import node_pb2


def version_message() -> node_pb2.Version:
    """What this coordinator speaks."""
    return node_pb2.Version(protocol=PROTOCOL, software=SOFTWARE)


def reject_other_version(theirs: node_pb2.Version) -> None:
    """Reject a peer of another protocol.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    reject_other_protocol(theirs.protocol, theirs.software or "it")


def reject_other_protocol(theirs: int, who: str) -> None:
    """As `reject_other_version`, for a bare number."""
    there, here = "on that machine", "where the coordinator runs"
    refuse_other_protocol(theirs, who, there=there, here=here)
