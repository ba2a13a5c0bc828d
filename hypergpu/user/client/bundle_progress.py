"""How far a farm job is, as its summary tells it."""

import msgspec

from hypergpu.v1 import farm_pb2


class OpenRunView(msgspec.Struct, frozen=True):
    """Items of a farm job that were given out and are not settled."""

    start: int
    """Position of the first item."""
    items: int


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
    open_runs: tuple[OpenRunView, ...] = ()
    """Those that were given out and are not settled; 1,000 at most."""


def bundles_view(progress: farm_pb2.BundleProgress) -> BundlesView:
    """Progress from the wire."""
    return BundlesView(
        items=progress.items,
        settled_items=progress.settled_items,
        failed_items=progress.failed_items,
        units=progress.units,
        unit=progress.unit,
        open_bundles=progress.open_bundles,
        item_kind=progress.item_kind,
        paid_units=progress.paid_units,
        unit_price=progress.unit_price,
        cost=progress.cost,
        budget=progress.budget,
        open_runs=tuple(OpenRunView(each.start, each.items) for each in progress.open_runs),
    )
