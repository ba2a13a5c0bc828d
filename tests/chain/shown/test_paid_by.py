"""By which transaction a node was paid last, by the chain's own events."""

from collections.abc import Sequence

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.cli.ledger.tiers.payments import LOOKED_AT_MOST, last_payments
from hypergpu.ids import NodeId
from tests.chain.ground import JOB, NODES, Ground

ALL = tuple(TransactionState)
IDS = [node.node_id for node in NODES]


def payments(ground: Ground) -> list[OutboxRow]:
    """The newest first."""
    rows = ground.journal.transactions(ground.settler.site.account, states=ALL)
    return [row for row in reversed(rows) if row.transaction.purpose.startswith("pay/")]


def named(row: OutboxRow) -> str:
    return f"0x{row.hash.hex()}"


def asked(ground: Ground, newest_first: Sequence[str]) -> dict[NodeId, str]:
    site = ground.settler.site
    assert site.domain is not None
    return last_payments(ground.chain, site.domain, site.job_key(JOB), IDS, newest_first)


def test_each_node_has_the_newest_transaction_that_paid_it(ground: Ground) -> None:
    first, *others = NODES
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0)
    ground.settle()
    early = payments(ground)
    ground.earn(1, range(1, 2), nodes=others)
    ground.end(1)
    ground.settle()
    newest_first = payments(ground)

    found = asked(ground, [named(row) for row in newest_first])
    assert set(found) == set(IDS)
    assert {found[node] for node in IDS[1:]} <= {named(row) for row in newest_first[: -len(early)]}
    assert found[first.node_id] in {named(row) for row in early}
    # A first payment passes nodes without stake over: it is no payment of theirs.
    events = {name: ground.chain.inclusions([bytes.fromhex(name[2:])]) for name in found.values()}
    assert all(place is not None and place.is_success for (place,) in events.values())


def test_what_is_in_no_block_and_what_pays_nobody_is_passed_over(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0)
    ground.settle()
    paid = [named(row) for row in payments(ground)]
    rows = ground.journal.transactions(ground.settler.site.account, states=ALL)
    others = [named(row) for row in rows if named(row) not in paid]
    assert asked(ground, ["0x" + 64 * "0", *others]) == {}
    assert set(asked(ground, ["0x" + 64 * "0", *others, *paid])) == set(IDS)
    assert asked(ground, ["0x" + 64 * "0"] * LOOKED_AT_MOST + paid) == {}
