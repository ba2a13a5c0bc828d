"""What the demo says of how it paid, by the transactions that there were."""

import pytest
from msgspec.structs import replace

from hypergpu.cli.demo.stakes import said_of_stakes
from hypergpu.cli.ledger.account import TransactionView
from tests.unit.cli.ledger.test_verifying import VIEW


def sent(purpose: str) -> TransactionView:
    return TransactionView("0x1", purpose, 0, "final", 7)


@pytest.mark.parametrize(
    ("purposes", "said"),
    [
        (["open/j", "pay/j/0/0", "pay/j/1/0"], "paid against stake: 2 epochs, none of which"),
        (["pay/j/0/0", "pay/j/0/1", "pay/j/1/0"], ""),
        (["open/j", "batch/j/0"], ""),
    ],
)
def test_a_window_that_somebody_waited_for_is_not_denied(purposes: list[str], said: str) -> None:
    view = replace(VIEW, transactions=[sent(purpose) for purpose in purposes])
    found = said_of_stakes(view)
    assert found.startswith(said)
    assert bool(found) == bool(said)
