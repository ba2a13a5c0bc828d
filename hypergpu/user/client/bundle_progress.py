"""How far a farm job is, as a user sees it."""

import msgspec


class BundlesView(msgspec.Struct, frozen=True):
    """How far a farm job is."""

    items: int
    settled_items: int
    """Items with an accepted result, or given up."""
    failed_items: int
    """Items that have a reason in place of a value, or were given up."""
    units: int
    """Accepted work so far, in ``unit``."""
    unit: str
    open_bundles: int
    """Bundles that nodes have now."""
    item_kind: str
    """Name of the kind of its items, such as ``embed``."""
    paid_units: int = 0
    """Work that receipts are given for: ``units``, and that of results that confirmed others."""
    unit_price: str = "0"
    """Price of 100 units in the smallest unit of money; empty or 0: no money is due."""
    cost: str = "0"
    """What ``paid_units`` cost by that price, rounded down."""
    budget: str = "0"
    """The most that the job may cost; 0: no limit."""
