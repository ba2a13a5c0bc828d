"""The protocol version. Both sides of every call state theirs."""

from importlib.metadata import PackageNotFoundError, version

from hypergpu.errors import HyperGPUError, Reason

PROTOCOL = 3
"""Peers refuse any other. It rises with every change after which an older peer would be refused
later, or understood otherwise: of a message, or of the bytes that somebody signs."""
CHANGES = {
    2: "nodes sign contributions as EIP-712 data of their job's ledger",
    3: "receipts state the node's total score, there are no vouchers, and journals begin anew",
}
"""Change that each protocol version brought."""
PROTOCOL_KEY = "hypergpu-protocol"
PROTOCOL_ENTRY = (PROTOCOL_KEY, str(PROTOCOL))
"""Metadata of every call."""
OUT_OF_MEMORY = "out of memory"
"""Beginning of the reason with which a node hands a shard back whose batch did not fit into its
memory. A plan then gives it a smaller one.
"""


def _software() -> str:
    try:
        return f"hypergpu {version('hypergpu')}"
    except PackageNotFoundError:
        return "hypergpu (a source tree)"


SOFTWARE = _software()
"""Name and version of this program for peers and people."""


def refuse_other_protocol(theirs: int, who: str, *, there: str, here: str) -> None:
    """Refuse a peer of another protocol.

    Args:
        theirs: That it speaks.
        who: It, for people.
        there: Where it runs, as the place to run a command.
        here: Where this program does.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with what changed and the command for the older side.
    """
    if theirs == PROTOCOL:
        return
    upgrade = f"run {there if theirs < PROTOCOL else here}: pip install --upgrade hypergpu"
    change = CHANGES.get(min(theirs, PROTOCOL) + 1, "")
    since = f" (since {min(theirs, PROTOCOL) + 1} {change})" if change else ""
    # Nodes log the detail alone: it must hold the command too.
    detail = f"{who} speaks protocol {theirs}, {SOFTWARE} speaks {PROTOCOL}{since}; {upgrade}"
    raise HyperGPUError(Reason.VERSION_MISMATCH, detail, fix=upgrade)
