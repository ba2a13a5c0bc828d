"""The version handshake: who is older is told the command that upgrades it."""

from hypergpu.v1 import node_pb2
from hypergpu.wire import protocol
from hypergpu.wire.protocol import PROTOCOL, SOFTWARE


def version_message() -> node_pb2.Version:
    """What this coordinator speaks."""
    return node_pb2.Version(protocol=PROTOCOL, software=SOFTWARE)


def refuse_other_version(theirs: node_pb2.Version) -> None:
    """Refuse a peer of another protocol.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    refuse_other_protocol(theirs.protocol, theirs.software or "it")


def refuse_other_protocol(theirs: int, who: str) -> None:
    """As `refuse_other_version`, for a bare number."""
    there, here = "on that machine", "where the coordinator runs"
    protocol.refuse_other_protocol(theirs, who, there=there, here=here)
