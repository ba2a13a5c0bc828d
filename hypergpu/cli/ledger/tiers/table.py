"""How far pay is, in a table for people."""

from collections.abc import Iterator

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.tiers.standing import CLAIM, TIERS, Due, NodeTiers, PayView
from hypergpu.terminal.output import Column

COLUMNS = (
    Column("node"),
    Column("T0 vouched", is_number=True),
    Column("T1 recorded", is_number=True),
    Column("T2 paid", is_number=True),
    Column("T3 final", is_number=True),
    Column("due", is_number=True),
)


def pay_lines(pay: PayView) -> list[str]:
    """What the table is of, and what its columns mean."""
    return [
        f"pay          at block {pay.block} of chain {pay.chain_id}, {moment(pay.time_s)}",
        f"ledger       {pay.contract}, with challenge windows of {pay.window_s} s",
        *(f"{name} {meaning}" for name, meaning in TIERS.items()),
    ]


def pay_rows(pay: PayView) -> list[list[str]]:
    """The table of `COLUMNS`: whole units."""
    return [
        [
            node.id[:10],
            node.vouched,
            node.recorded,
            node.paid,
            node.final,
            str(_sum(node.due)),
        ]
        for node in pay.nodes
    ]


def due_lines(pay: PayView) -> Iterator[str]:
    """When what is due is paid at the latest: of each node a line for each thing to wait for."""
    for node in pay.nodes:
        yield from (f"{node.id[:10]}: {text}" for text in due_of(node, pay))


def due_of(node: NodeTiers, pay: PayView) -> Iterator[str]:
    """What one node waits for; epochs that wait for the same are one."""
    shares = [one for one in node.due if one.what != CLAIM]
    closed = [(one, one.at_s) for one in shares if one.at_s is not None]
    if ready := [(one, at_s) for one, at_s in closed if at_s <= pay.time_s]:
        since = moment(min(at_s for _, at_s in ready))
        yield f"{_said([one for one, _ in ready])}: anybody may have it paid, since {since}"
    if waiting := [(one, at_s) for one, at_s in closed if at_s > pay.time_s]:
        first, last = (moment(pick(at_s for _, at_s in waiting)) for pick in (min, max))
        when = first if first == last else f"{first} to {last}"
        yield f"{_said([one for one, _ in waiting])}: due at {when}"
    if still_open := [one for one in shares if one.at_s is None]:
        yield f"{_said(still_open)}: due {pay.window_s} s after it is closed"
    for claim in node.due:
        if claim.what == CLAIM and claim.at_s is not None:
            when = f"due at {moment(claim.at_s)}"
            if claim.at_s <= pay.time_s:
                when = f"anybody may have it paid, since {moment(claim.at_s)}"
            yield f"{_said([claim])}: {when}"


def _said(due: list[Due]) -> str:
    more = f" and {len(due) - 1} more" if len(due) > 1 else ""
    return f"{_sum(due)} of {due[0].what}{more}"


def _sum(due: list[Due]) -> int:
    return sum(int(one.amount) for one in due)
