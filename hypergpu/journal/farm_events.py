"""Public events of farm jobs. No text of an item is in them: runs of items and counts are."""

from hypergpu.ids import JobId
from hypergpu.journal.public_event import PublicEvent


class MapCreatedEvent(PublicEvent, frozen=True):
    """A user asked for a farm job."""

    job_id: JobId
    item_kind: str
    items: int
    unit: str
    """Name of what its work is counted and paid in."""


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


FARM_EVENTS: tuple[type[PublicEvent], ...] = (
    MapCreatedEvent,
    BundleReturnedEvent,
    BundleHandedBackEvent,
    BundleAcceptedEvent,
    BundlesDueEvent,
    ResultsComparedEvent,
    ItemDroppedEvent,
    ResultDoubtedEvent,
)
"""All of them."""
