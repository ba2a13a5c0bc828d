"""Units in which the work of farm jobs is counted and paid: a closed list, whole numbers only.

A bundle's exact amount is summed over its items and then rounded up once, so that rounding never
adds up within a bundle. A result of zero units is refused: work that is not counted is not paid.
"""

from enum import Enum
from fractions import Fraction

from hypergpu.errors import HyperGPUError, Reason

UNITS_MOST = 2**48 - 1
"""Largest amount of one bundle."""


class WorkUnit(Enum):
    """A unit of work. Its value is the name in terms, receipts, journals and on screens."""

    SAMPLES = "samples"
    ITEMS = "items"
    TOKENS = "tokens"
    MEGAPIXEL_STEPS = "megapixel-steps"
    LAYER_TOKENS = "layer-tokens"

    @property
    def is_count_of_items(self) -> bool:
        """Whether an item is always one unit, so that the count needs nobody's word."""
        return self is WorkUnit.ITEMS


def whole_units(amount: Fraction | int) -> int:
    """A bundle's amount in whole units, rounded up.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is zero, negative or above `UNITS_MOST`.
    """
    units = -(-amount // 1)
    if not 0 < units <= UNITS_MOST:
        detail = f"{amount} units of work: a result has 1 to {UNITS_MOST}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="count the work of done items")
    return int(units)
