"""What happens to a farm job. Bundles are named by runs of items; no text or value of an item is in
any event, and no row is an item's unless the item was given up.
"""

import msgspec

from coordinator.core.farm.state import CheckRule
from coordinator.core.work.funding import Funding
from coordinator.core.work.work_events import (
    CoordinatorChanged,
    FundingChanged,
    JobEnded,
    JobPaused,
    JobResumed,
    JobStopped,
    MembershipEvent,
    StampedEvent,
)
from hypergpu.blobs import BlobRef
from hypergpu.farm.bundles import BundleResult
from hypergpu.farm.map_request import MapRequest
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.journal.farm_events import FarmPay
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.ledger_terms import Terms
from hypergpu.signed_spec import SignedSpec
from hypergpu.statements import SignedContribution
from hypergpu.units import Wei


class MapCreated(StampedEvent, frozen=True, tag=True):
    """A user asked for the job."""

    job_id: JobId
    owner: TokenId
    request: MapRequest
    item_kind: str
    """As of the request, for readers who do not see the request."""
    items: int
    unit: str
    bundle_items_most: int
    """Items that a bundle has at most, so that it touches few chunks: from the manifest."""
    draw_seed: str = ""
    """Secret that decides what is done twice."""
    check_rule: CheckRule = CheckRule.COPIES
    """An earlier version wrote none."""
    terms: Terms = Terms()
    pay: FarmPay | None = None
    """None: an earlier version created it, and its results have no receipts."""
    funding: Funding | None = None
    spec: SignedSpec | None = None
    """What the user signed of the work; None: nothing."""


class BundleReturned(StampedEvent, frozen=True, tag=True):
    """A node sent the result of a bundle. It counts once it is accepted."""

    node: NodeId
    bundle: int
    lease: int
    result: BundleResult
    claim: SignedContribution | None = None
    """The node's statement of the result; None: it signs none, or there is no work to count."""


class BundleHandedBack(StampedEvent, frozen=True, tag=True):
    """A node gave a bundle back undone."""

    node: NodeId
    bundle: int
    lease: int
    reason: str
    lacks_memory: bool = False
    is_refused: bool = False
    """A limit of the node's owner forbids the work, whatever the bundle."""


class BundlesDue(StampedEvent, frozen=True, tag=True):
    """The time of at least one lease is over."""


class ResultsCompared(StampedEvent, frozen=True, tag=True):
    """The newest result of a bundle was compared with the earlier ones."""

    bundle: int
    lease: int
    """Lease of the newest result."""
    agreeing: tuple[int, ...]
    """Leases of the earlier results that agree with it."""


class Confirmation(msgspec.Struct, frozen=True, array_like=True):
    """A result that agrees with the accepted one."""

    node: NodeId
    lease: int
    units: int


class BundleAccepted(StampedEvent, frozen=True, tag=True):
    """The result of a bundle counts: a record, which the machine never reads. A result is accepted
    at most once for each item.
    """

    node: NodeId
    bundle: int
    lease: int
    start: int
    items: int
    """Items of the bundle, with those that have a reason in place of a value."""
    failures: int
    units: int
    blob: BlobRef
    tries: int
    confirmations: tuple[Confirmation, ...] = ()
    """Results of other nodes that agree, which are paid too."""
    works: tuple[MeasuredWork, ...] = ()
    """The accepted result and its confirmations, those that their nodes signed: each becomes a
    receipt.
    """


class PartConfirmed(StampedEvent, frozen=True, tag=True):
    """Nodes agree on the checked part of a bundle whose own result they outvoted: theirs are paid.
    A record, which the machine never reads.
    """

    bundle: int
    start: int
    items: int
    """Items of the part."""
    units: int
    """Work of all their results together."""
    confirmations: tuple[Confirmation, ...]
    works: tuple[MeasuredWork, ...] = ()
    """Those that their nodes signed: each becomes a receipt."""


class ItemDropped(StampedEvent, frozen=True, tag=True):
    """An item was given up: a record, which the machine never reads."""

    item: int
    reason: str


class ResultDoubted(StampedEvent, frozen=True, tag=True):
    """Two other nodes agree on another result: this one is not paid. A record."""

    node: NodeId
    bundle: int
    lease: int
    reason: str


class BudgetRaised(StampedEvent, frozen=True, tag=True):
    """The job may cost more from now on."""

    budget: Wei
    spec: SignedSpec | None = None
    """What its user signed of it; None: the job's orders are not signed."""


FarmEvent = (
    MapCreated
    | BundleReturned
    | BundleHandedBack
    | BundlesDue
    | ResultsCompared
    | BundleAccepted
    | PartConfirmed
    | ItemDropped
    | ResultDoubted
    | BudgetRaised
    | MembershipEvent
    | JobPaused
    | JobResumed
    | JobStopped
    | FundingChanged
    | CoordinatorChanged
    | JobEnded
)
