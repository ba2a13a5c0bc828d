"""What a unit of gas may cost (EIP-1559): the first offer, and higher ones for what got stuck."""

import msgspec

from coordinator.core.settlement.sending import Attempt

_REPLACE_PERCENT = 125
"""Pools want 10 % more for a replacement (geth) or 12.5 % (several rollups): both are met."""


class FeeRule(msgspec.Struct, frozen=True, kw_only=True):
    """What a chain's profile says about fees, in wei for one unit of gas."""

    tip_wei: int
    """Least tip offered."""
    max_fee_cap_wei: int
    """Never more than this; what is stuck beneath it waits and is reported."""
    base_fee_multiple: int = 2
    """The first offer covers a base fee so many times the present one: two is six full blocks."""


class Fee(msgspec.Struct, frozen=True):
    """An offer."""

    max_fee_wei: int
    tip_wei: int


def opening_fee(base_fee_wei: int, suggested_tip_wei: int, rule: FeeRule) -> Fee:
    """The first offer for a transaction, at most the rule's cap."""
    tip_wei = min(max(suggested_tip_wei, rule.tip_wei), rule.max_fee_cap_wei)
    max_fee_wei = rule.base_fee_multiple * base_fee_wei + tip_wei
    return Fee(min(max_fee_wei, rule.max_fee_cap_wei), tip_wei)


def higher_fee(newest: Attempt, base_fee_wei: int, rule: FeeRule) -> Fee | None:
    """An offer that a pool takes in place of ``newest``; None when it would pass the rule's cap.

    Both parts rise by at least a quarter, since pools compare both.
    """
    tip_wei = _raised(newest.tip_wei)
    max_fee_wei = max(_raised(newest.max_fee_wei), rule.base_fee_multiple * base_fee_wei + tip_wei)
    least_wei = _raised(newest.max_fee_wei)
    if least_wei > rule.max_fee_cap_wei:
        return None
    return Fee(min(max_fee_wei, rule.max_fee_cap_wei), min(tip_wei, rule.max_fee_cap_wei))


def _raised(amount_wei: int) -> int:
    return amount_wei * _REPLACE_PERCENT // 100 + 1
