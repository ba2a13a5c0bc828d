"""How far pay is, in a table for people."""

from collections.abc import Mapping

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.tiers.standing import TIERS, Due, NodeTiers, PayView
from hypergpu.cli.output import Column
from hypergpu.ids import NodeId

COLUMNS = (
    Column("node"),
    Column("T0 vouched", is_number=True),
    Column("T1 recorded", is_number=True),
    Column("T2 paid", is_number=True),
    Column("T3 final", is_number=True),
    Column("pending", is_number=True),
    Column("due", is_number=True),
    Column("due at"),
)


def pay_lines(pay: PayView) -> list[str]:
    """What the table is of, and what its columns mean."""
    return [
        f"pay          at block {pay.block} of chain {pay.chain_id}, {moment(pay.time_s)}",
        f"ledger       {pay.contract}, with challenge windows of {pay.window_s} s",
        "; ".join(f"{name} {meaning}" for name, meaning in TIERS.items()),
    ]


def pay_rows(pay: PayView, names: Mapping[NodeId, str]) -> list[list[str]]:
    """The table of `COLUMNS`: whole units.

    Args:
        pay: Of a job.
        names: What nodes are called, where they have names.
    """
    return [
        [
            f"{node.id[:10]} {names.get(node.id, '')}".strip(),
            node.vouched,
            node.recorded,
            node.paid,
            node.final,
            node.pending,
            str(sum(int(one.amount) for one in node.due)),
            due_at(node, pay),
        ]
        for node in pay.nodes
    ]


def due_at(node: NodeTiers, pay: PayView) -> str:
    """When what is due is paid at the latest; where there are several things, for each."""
    alone = len(node.due) == 1
    return "; ".join(
        _when(one, pay) if alone else f"{one.amount} {_when(one, pay)}" for one in node.due
    )


def _when(due: Due, pay: PayView) -> str:
    if due.at_s is None:
        return f"{pay.window_s} s after {due.what} is closed"
    if due.at_s <= pay.time_s:
        return f"since {moment(due.at_s)}: anybody may have {due.what} paid"
    return f"{moment(due.at_s)} ({due.what})"
