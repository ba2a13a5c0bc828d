"""What nodes have on the ledger that is not in their wallets."""

from hypergpu.cli.ledger.account import Standing, waiting_lines, with_standings
from tests.unit.cli.ledger.test_verifying import VIEW
from tests.unit.node.test_wallet import NODE


def test_what_a_node_has_not_in_its_wallet_is_told_with_its_time() -> None:
    has = {NODE.node_id: Standing(paid=2000, pending=500, release_at_s=90, credit=40)}
    view = with_standings(VIEW, has, {})
    pending, credit = waiting_lines(view.nodes, 3)
    assert pending == (
        f"{NODE.node_id[:10]} (home): 500 (0.500) of its voucher is pending until"
        " 1970-01-01 00:01:30 UTC, then the node takes it: hypergpu ledger claim"
    )
    assert credit.startswith(f"{NODE.node_id[:10]} (home): 40 (0.040) is credit")
    assert list(waiting_lines(VIEW.nodes, 3)) == []
    settled = with_standings(VIEW, {NODE.node_id: Standing(paid=2700)}, {})
    assert settled.nodes[0].pending_until_s is None
    assert list(waiting_lines(settled.nodes, 3)) == []
