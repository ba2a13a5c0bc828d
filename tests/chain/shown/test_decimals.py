"""How many decimals a ledger's token has is asked of the token itself."""

from typing import Any

import pytest

from hypergpu.chain.reading.ledger import LedgerReader
from hypergpu.cli.ledger.reading import token_decimals
from hypergpu.ledger.typed import Domain, address_bytes
from tests.chain.ground import Ground

USUAL = 6
ANSWERS = {
    18: "0x601260005260206000f3",
    36: "0x60ff60005260206000f3",
    # A token without decimals reverts.
    0: "0x60006000fd",
}
"""Code that gives one word whatever it is asked: 18; 255, of which 36 are shown; and no word."""


def ledger(ground: Ground) -> Domain:
    domain = ground.opened().settler.site.domain
    assert domain is not None
    return domain


def test_the_tokens_own_are_told(ground: Ground) -> None:
    assert token_decimals(ground.chain, ledger(ground)) == USUAL


@pytest.mark.parametrize("decimals", ANSWERS)
def test_a_token_of_any_decimals_is_told_rightly(ground: Ground, decimals: int) -> None:
    domain = ledger(ground)
    told: tuple[Any, ...] = LedgerReader(ground.chain, address_bytes(domain.contract)).asked(
        None, "TOKEN"
    )
    ground.ask("anvil_setCode", told[0], ANSWERS[decimals])
    assert token_decimals(ground.chain, domain) == decimals
