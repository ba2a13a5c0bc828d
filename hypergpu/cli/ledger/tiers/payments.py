"""By which transactions nodes were paid: by the events of what the coordinator sent to pay them."""

from collections.abc import Collection, Sequence

from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT
from hypergpu.chain.rpc.answers import Event, octets
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.ids import JobKey, NodeId
from hypergpu.ledger.typed import Domain, address_bytes, word_bytes

LOOKED_AT_MOST = 100
"""Payments, the newest: each is asked for by itself, and a node that left is in none of them."""
_AT_ONCE = 20
_PAID = "SharesPaid"


def last_payments(
    chain: EvmChain,
    ledger: Domain,
    job: JobKey,
    nodes: Collection[NodeId],
    newest_first: Sequence[str],
) -> dict[NodeId, str]:
    """The hash of the newest transaction that paid each node a share, where one is found.

    Args:
        chain: The ledger's.
        ledger: That pays.
        job: What was worked for.
        nodes: Whose; once all are found no older payment is looked at.
        newest_first: Hashes of transactions that pay shares of the job.

    Raises:
        RpcError: the chain cannot be asked, or its answers cannot be believed.
    """
    abi, found = Abi(artifact(CONTRACT).abi), dict[NodeId, str]()
    contract, wanted = address_bytes(ledger.contract), (abi.topic(_PAID), word_bytes(job))
    looked_at = newest_first[:LOOKED_AT_MOST]
    for start in range(0, len(looked_at), _AT_ONCE):
        if found.keys() >= set(nodes):
            break
        hashes = looked_at[start : start + _AT_ONCE]
        try:
            places = chain.inclusions([octets(name) for name in hashes])
        except RpcRefusedError:
            # It has forgotten transactions so old.
            break
        for name, place in zip(hashes, places, strict=True):
            for event in place.events if place is not None else ():
                if event.address == contract and event.topics[:2] == wanted:
                    for node in _paid(abi, event):
                        found.setdefault(node, name)
    return found


def _paid(abi: Abi, event: Event) -> list[NodeId]:
    """Nodes that were paid more than nothing."""
    told = abi.event(event)
    if told is None:
        return []
    paid = zip(told[1]["nodes"], told[1]["amounts"], strict=True)
    return [NodeId(node) for node, amount in paid if amount]
