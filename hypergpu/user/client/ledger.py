"""Pay of a job as its coordinator states it, and its translation from the wire.

Amounts are whole numbers of the token's smallest unit, as decimal text: JSON readers lose digits of
numbers that are this large.
"""

import msgspec

from hypergpu.ledger_terms import Terms
from hypergpu.user.client.values import view_of
from hypergpu.v1 import payments_pb2
from hypergpu.wire.messages import terms_value


class ShareOfEpoch(msgspec.Struct, frozen=True):
    """A node's share of one epoch."""

    epoch: int
    score: int
    state: str
    """measured, recorded, closed, paid, locked (paid against stake) or void."""
    amount: str
    """As the ledger holds it; empty where nothing is recorded."""


class NodeAccount(msgspec.Struct, frozen=True):
    """A node's account in a job."""

    node_id: str
    name: str
    """The owner's name of the machine; empty while the node is away."""
    receipts: int
    samples: int
    total_score: int
    worth: str
    shares: tuple[ShareOfEpoch, ...]
    allotted: str
    """Empty, as ``paid``, where the chain was not read."""
    paid: str


class LedgerTransaction(msgspec.Struct, frozen=True):
    """A transaction that was signed for the job."""

    hash: str
    purpose: str
    state: str
    """queued, sent, mined, final or failed."""
    block: int
    """0: none."""
    attempts: tuple[str, ...]
    """Hashes, oldest first; any of them may be mined."""


class LedgerOnChain(msgspec.Struct, frozen=True):
    """The job as the ledger held it at one block."""

    url: str
    block: int
    block_time_unix_s: int
    is_open: bool
    free_escrow: str
    batches: int
    ends_at_unix_s: int
    """0: no end is announced."""
    token: str
    decimals: int


class JobLedger(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/ledger/3"):
    """`ledger show`: what a job owes its nodes, and the state of its settlement."""

    job: str
    terms: Terms
    unit_price: str
    escrow: str
    is_over: bool
    open_epoch: int
    nodes: tuple[NodeAccount, ...]
    transactions: tuple[LedgerTransaction, ...]
    """Oldest first."""
    on_chain: LedgerOnChain | None
    """None without a chain, and while the chain was not read yet."""
    halted: str
    """Why nothing is sent for the job any more; empty while all is well."""
    unfunded: str
    """Why no round of the job may open; empty while the escrow covers the next one."""
    unit: str
    """What the job's work is counted in; empty: samples, by a coordinator of an earlier version."""


def job_ledger(job_id: str, found: payments_pb2.GetLedgerResponse) -> JobLedger:
    """A job's ledger from the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, the terms are malformed.
    """
    return view_of(
        JobLedger,
        found,
        job=job_id,
        terms=terms_value(found.terms),
        nodes=tuple(_node_account(each) for each in found.nodes),
        transactions=tuple(
            view_of(LedgerTransaction, each, attempts=tuple(each.attempts))
            for each in found.transactions
        ),
        on_chain=view_of(LedgerOnChain, found.on_chain) if found.HasField("on_chain") else None,
    )


def _node_account(node: payments_pb2.LedgerNode) -> NodeAccount:
    shares = tuple(view_of(ShareOfEpoch, each) for each in node.shares)
    return view_of(NodeAccount, node, shares=shares)
