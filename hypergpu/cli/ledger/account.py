"""A job's accounts as plain data: the schema of `ledger show --json`, and the table of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.tiers.standing import PayView
from hypergpu.ids import Address, NodeId
from hypergpu.terminal.output import Column
from hypergpu.units import several
from hypergpu.v1 import job_pb2
from hypergpu.wire.ledger import terms_value

_COLUMNS = (
    Column("node"),
    Column("name", folds=True),
    Column("contributions", is_number=True),
    Column("quality", is_number=True),
    Column("earned", is_number=True),
)
_UNASKED = (Column("voucher", is_number=True),)
_ASKED = (Column("paid", is_number=True), Column("paid by"))


class NodeAccountView(msgspec.Struct, frozen=True):
    """What a job owes one node. Amounts are whole units, as text: they may be long."""

    id: NodeId
    name: str
    contributions: int
    samples: int
    quality_bps: int
    """Mean over the samples."""
    earned: str
    vouched: str
    paid: str | None
    """Into its wallet or its credit, by the chain; None when it was not asked."""
    pending: str | None = None
    """What a voucher claims and its window still holds, by the chain."""
    pending_until_s: int | None = None
    """By the chain's clock; None: nothing is pending."""
    credit: str | None = None
    """What the token would not transfer to it, in all jobs of the ledger, by the chain."""
    paid_by: str | None = None
    """Hash of the coordinator's newest transaction that paid it a share; None: none is known."""


class Standing(NamedTuple):
    """What a node has, by the chain. Amounts are of the token's smallest unit."""

    paid: int = 0
    """For the job, into its wallet or its credit."""
    pending: int = 0
    """What a voucher claims and its window still holds."""
    release_at_s: int = 0
    """When that may be paid."""
    credit: int = 0
    """What the token would not transfer, in all jobs of the ledger."""


class TransactionView(msgspec.Struct, frozen=True):
    """What was signed to settle the job."""

    hash: str
    purpose: str
    epoch: int
    state: str
    block: int
    attempts: list[str] = []
    """All of its hashes, oldest first. It was signed again for a higher fee: any may be mined."""


class ChainView(msgspec.Struct, frozen=True):
    """How settling goes."""

    url: str
    """Empty: the coordinator does not hand it out, since there may be a secret in it."""
    height: int
    waiting: int
    mined: int
    complaint: str
    halted: str


class LedgerView(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/ledger/1"):
    """What a job owes."""

    job: str
    key: str
    coordinator: Address
    chain_id: int
    contract: Address
    unit_price: str
    escrow: str
    spent: str
    is_over: bool
    unmeasured_rounds: int
    nodes: list[NodeAccountView]
    transactions: list[TransactionView]
    chain: ChainView | None
    pay: PayView | None = None
    """How far it is, by the chain; None when it was not asked."""
    decimals: int | None = None
    """Of the token, by the chain; None when it was not asked."""


def ledger_view(job_id: str, answer: job_pb2.GetLedgerResponse) -> LedgerView:
    """A coordinator's answer as plain data.

    Raises:
        HyperGPUError: REQUEST_INVALID, its terms are malformed.
    """
    terms = terms_value(answer.terms)
    return LedgerView(
        job=job_id,
        key=terms.job,
        coordinator=terms.coordinator,
        chain_id=terms.domain.chain_id,
        contract=terms.domain.contract,
        unit_price=answer.unit_price,
        escrow=answer.escrow,
        spent=answer.spent,
        is_over=answer.is_over,
        unmeasured_rounds=answer.unmeasured_rounds,
        nodes=[_node_view(node) for node in answer.nodes],
        transactions=[_transaction_view(row) for row in answer.transactions],
        chain=_chain_view(answer.chain) if answer.HasField("chain") else None,
    )


def with_standings(
    view: LedgerView, standings: Mapping[NodeId, Standing], paid_by: Mapping[NodeId, str]
) -> LedgerView:
    """The same with what the chain says that nodes have, and by which transactions."""
    nodes = [_with_standing(node, standings[node.id], paid_by.get(node.id)) for node in view.nodes]
    return msgspec.structs.replace(view, nodes=nodes)


def _with_standing(node: NodeAccountView, has: Standing, paid_by: str | None) -> NodeAccountView:
    return msgspec.structs.replace(
        node,
        paid=str(has.paid),
        pending=str(has.pending),
        pending_until_s=has.release_at_s if has.pending else None,
        credit=str(has.credit),
        paid_by=paid_by,
    )


def _transaction_view(row: job_pb2.LedgerTransaction) -> TransactionView:
    attempts = list(row.attempts) or [row.hash]
    return TransactionView(row.hash, row.purpose, row.epoch, row.state, row.block, attempts)


def _chain_view(chain: job_pb2.ChainState) -> ChainView:
    return ChainView(
        url=chain.url,
        height=chain.height,
        waiting=chain.waiting,
        mined=chain.mined,
        complaint=chain.complaint,
        halted=chain.halted,
    )


def _node_view(node: job_pb2.LedgerNode) -> NodeAccountView:
    return NodeAccountView(
        id=NodeId(node.node_id),
        name=node.name,
        contributions=node.receipts,
        samples=node.samples,
        quality_bps=int(node.score) // node.samples if node.samples else 0,
        earned=node.earned,
        vouched=node.vouched,
        paid=None,
    )


def ledger_lines(view: LedgerView, decimals: int | None) -> list[str]:
    """The sums, in words; amounts alone where the token's decimals are not known."""
    terms = "no chain" if not view.chain_id else f"chain {view.chain_id}, {view.contract}"
    lines = [f"job          {view.job}, signed for by {view.coordinator} ({terms})"]
    if view.unit_price != "0":
        lines += [
            f"token        {_said_of(decimals)}",
            f"unit price   {shown(view.unit_price, decimals)} for a score of 1,000,000",
            f"escrow       {shown(view.escrow, decimals)}",
            f"spent        {shown(view.spent, decimals)} by epochs that are over, paid or not yet",
        ]
        paid = paid_in_all(view)
        if paid is not None:
            lines.append(f"paid         {shown(str(paid), decimals)} by now")
    else:
        lines.append("pay          none: receipts alone")
    if view.chain is not None:
        chain = view.chain
        where = f"of {chain.url}" if chain.url else "by an RPC that the coordinator does not name"
        lines.append(
            f"settlement   block {chain.height} {where},"
            f" {several(chain.waiting, 'transaction')} in no block, {chain.mined} not final"
        )
        if wrong := chain.halted or chain.complaint:
            lines.append(f"             {wrong}")
    if view.unmeasured_rounds:
        lines.append(f"unmeasured   {several(view.unmeasured_rounds, 'round')}")
    return lines


def columns(view: LedgerView) -> tuple[Column, ...]:
    """What is told of each node; where no chain was asked, what is promised instead of paid."""
    return (*_COLUMNS, *(_UNASKED if paid_in_all(view) is None else _ASKED))


def rows(view: LedgerView) -> list[list[str]]:
    """The table of `columns`, in whole units, with the sums of several nodes below."""
    is_asked = paid_in_all(view) is not None
    table = [
        [
            node.id[:10],
            node.name,
            str(node.contributions),
            _percent(node.quality_bps),
            node.earned,
            *([node.paid or "0", (node.paid_by or "")[:10]] if is_asked else [node.vouched]),
        ]
        for node in view.nodes
    ]
    if len(table) <= 1:
        return table
    return [*table, [*_totals(view.nodes), *([""] if is_asked else [])]]


def _totals(nodes: Sequence[NodeAccountView]) -> list[str]:
    samples = sum(node.samples for node in nodes)
    weighed = sum(node.samples * node.quality_bps for node in nodes)
    return [
        "total",
        "",
        str(sum(node.contributions for node in nodes)),
        _percent(weighed // samples if samples else 0),
        str(sum(int(node.earned) for node in nodes)),
        str(sum(int(node.vouched if node.paid is None else node.paid) for node in nodes)),
    ]


def _percent(bps: int) -> str:
    return f"{bps / 100:.1f}%"


def paid_in_all(view: LedgerView) -> int | None:
    """To all nodes; None: no chain was asked."""
    if any(node.paid is None for node in view.nodes):
        return None
    return sum(int(node.paid or 0) for node in view.nodes)


def unpaid(view: LedgerView) -> int:
    """What nodes have earned and not been paid yet; all of it where no chain was asked."""
    return sum(max(0, int(node.earned) - int(node.paid or 0)) for node in view.nodes)


def waiting_lines(nodes: Sequence[NodeAccountView], decimals: int | None) -> Iterator[str]:
    """What nodes have on the ledger that is not in their wallets yet."""
    for node in nodes:
        whose = f"{node.id[:10]} ({node.name})" if node.name else node.id[:10]
        if node.pending_until_s is not None and node.pending is not None:
            yield (
                f"{whose}: {shown(node.pending, decimals)} of its voucher is pending until"
                f" {moment(node.pending_until_s)}, then the node takes it: hypergpu ledger claim"
            )
        if node.credit not in {None, "0"}:
            yield (
                f"{whose}: {shown(str(node.credit), decimals)} is credit, which the token refused"
                " to transfer; the node takes it: hypergpu ledger claim"
            )


def _said_of(decimals: int | None) -> str:
    if decimals is None:
        return "its decimals are not known, as no chain was asked: name them with --decimals N"
    return f"of {several(decimals, 'decimal')}; amounts are whole numbers of its smallest unit"


def shown(amount: str, decimals: int | None) -> str:
    """A whole number of the smallest unit with its decimals: ``1500000 (1.500000)``."""
    if not decimals:
        return amount
    digits = amount.rjust(decimals + 1, "0")
    return f"{amount} ({digits[:-decimals]}.{digits[-decimals:]})"
