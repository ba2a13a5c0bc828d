"""Version of the protocol between nodes, users and coordinator, and the refusal of any other.

Imported by `hypergpu --help`: nothing heavy is imported here.
"""

from importlib.metadata import PackageNotFoundError, version

from hypergpu.errors import HyperGPUError, Reason

PROTOCOL = 7
"""Peers refuse any other. It rises with every change after which an older peer would be refused
later, or understood otherwise: of a message, or of the bytes that somebody signs."""
CHANGES = {
    2: "nodes sign contributions as EIP-712 data of their job's ledger",
    3: "receipts state the node's total score, there are no vouchers, and journals begin anew",
    4: "blobs move by HTTP, over the coordinator's bulk port",
    5: "they may move through an object store",
    6: "a job chooses its inner optimizer and what it clips",
    7: "an update is one request to the bulk port",
}
"""Change that each protocol version brought."""
PROTOCOL_KEY = "hypergpu-protocol"
PROTOCOL_ENTRY = (PROTOCOL_KEY, str(PROTOCOL))
"""Metadata of every call."""


def version_text(program: str) -> str:
    """A program's name with the version of all of them."""
    try:
        return f"{program} {version('hypergpu')}"
    except PackageNotFoundError:
        return f"{program} (a source tree)"


SOFTWARE = version_text("hypergpu")
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
