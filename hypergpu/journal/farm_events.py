"""Public events of farm jobs. No text of an item is in them: runs of items and counts are."""

import msgspec

from hypergpu.ids import Digest, JobId
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.public_event import PublicEvent
from hypergpu.ledger_terms import Terms
from hypergpu.units import Wei


class FarmPay(msgspec.Struct, frozen=True, kw_only=True):
    """Pay for accepted results of a farm job, in the smallest units of the ledger's token."""

    unit_price: Wei
    """Price of 100 units; 0: receipts are counted and no money is due."""
    budget: Wei
    """Amount set aside for the job, and the most that it may cost."""
    bundles_per_epoch: int
    """Accepted bundles whose receipts are settled together."""
    request: Digest
    """Digest of what the user asked for."""
    manifest: Digest
    """Digest of the input's manifest."""


class MapCreatedEvent(PublicEvent, frozen=True):
    """A user asked for a farm job."""

    job_id: JobId
    item_kind: str
    items: int
    unit: str
    """Name of what its work is counted and paid in."""
    terms: Terms = Terms()
    pay: FarmPay | None = None
    """None: an earlier version created it, and its results have no receipts."""


class BundleReturnedEvent(PublicEvent, frozen=True):
    """A node sent the result of a bundle, which counts once it is accepted."""

    node: str
    bundle: int


class BundleHandedBackEvent(PublicEvent, frozen=True):
    """A node gave a bundle of items back undone."""

    node: str
    bundle: int
    reason: str = ""


class BundleAcceptedEvent(PublicEvent, frozen=True):
    """The result of a bundle counts; no item has another one."""

    node: str
    bundle: int
    start: int
    """Position of the bundle's first item."""
    items: int
    units: int
    """Work of the items with a value, in the job's unit."""
    failures: int = 0
    """Items with a reason in place of a value."""
    tries: int = 1
    works: tuple[MeasuredWork, ...] = ()
    """The results that counted, with their nodes' signatures, the accepted one first; without those
    that are not signed.
    """


class PartConfirmedEvent(PublicEvent, frozen=True):
    """Nodes agree on a part of a bundle whose own result they outvoted. Theirs are paid."""

    bundle: int
    units: int
    """Work of all their results, in the job's unit."""
    works: tuple[MeasuredWork, ...] = ()
    """The results that counted, with their nodes' signatures."""


class BundlesDueEvent(PublicEvent, frozen=True):
    """The time of at least one bundle's lease is over."""


class ResultsComparedEvent(PublicEvent, frozen=True):
    """The newest result of a bundle was compared with the earlier ones."""

    bundle: int


class ItemDroppedEvent(PublicEvent, frozen=True):
    """An item was given up."""

    item: int
    reason: str = ""


class ResultDoubtedEvent(PublicEvent, frozen=True):
    """Other nodes agree on another result than this node's, which is not paid."""

    node: str
    bundle: int
    reason: str = ""


class BudgetRaisedEvent(PublicEvent, frozen=True):
    """The job may cost more from now on."""

    budget: Wei


FARM_EVENTS: tuple[type[PublicEvent], ...] = (
    MapCreatedEvent,
    BundleReturnedEvent,
    BundleHandedBackEvent,
    BundleAcceptedEvent,
    PartConfirmedEvent,
    BundlesDueEvent,
    ResultsComparedEvent,
    ItemDroppedEvent,
    ResultDoubtedEvent,
    BudgetRaisedEvent,
)
"""All of them."""
