"""A farm job: items that wait in runs, bundles that nodes have, and counts of what is settled.

Each item is in exactly one place: in the untouched rest, in a waiting run, in an open bundle, or
settled. What is settled is a count here; the accepted results themselves are rows of the journal,
so that a state stays as small as the number of nodes whatever the number of items.
"""

from collections.abc import Iterator, Mapping
from enum import Enum

import msgspec

from coordinator.core.work.leases import LeasedWork
from coordinator.core.work.members import JobMember, LeasedJob
from hypergpu.farm.bundles import BundleResult
from hypergpu.farm.map_request import MapRequest
from hypergpu.ids import NodeId
from hypergpu.ledger_terms import Terms
from hypergpu.signed_spec import SignedSpec
from hypergpu.statements import SignedContribution
from hypergpu.units import Milliseconds


class FarmPhase(Enum):
    """Where a job is. Snapshots hold the values: they never change."""

    WORKING = "working"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"


ENDED = frozenset({FarmPhase.FINISHED, FarmPhase.STOPPED})


class CheckRule(Enum):
    """What of a job's work is done twice in secret. Journals hold the values: they never change."""

    COPIES = "copies"
    """A share of the bundles, as a whole: jobs of earlier versions."""
    PARTS = "parts"
    """A few items of every bundle: see `coordinator.core.farm.part_checks`."""


class BundlePace(msgspec.Struct, frozen=True, array_like=True):
    """What a member's newest bundle took, with all transfers; 0 items: it has returned none."""

    took_ms: Milliseconds = Milliseconds(0)
    items: int = 0

    def items_in(self, span_ms: int) -> int:
        """Items that it does in so much time."""
        return self.items * span_ms // max(1, self.took_ms)

    def span_for(self, items: int) -> Milliseconds:
        """Time that so many items take; 0: nothing is known."""
        return Milliseconds(self.took_ms * items // self.items if self.items else 0)


class FarmMember(JobMember, frozen=True, kw_only=True):
    """A node that has ever joined the job."""

    pace: BundlePace = BundlePace()
    items_most: int = 0
    """Items that fit into its memory at most; 0: nothing is known."""
    agreements: int = 0
    """Results of it that another node's confirmed."""
    wrongs: int = 0
    """Results of it that two other nodes outvoted."""
    failures_in_a_row: int = 0
    """Bundles that it gave back since it returned one."""
    refusal: str = ""
    """Why it is given no bundle while it is there; empty: it is."""
    accepted_lease: int = 0
    """Newest lease under which it returned a result."""
    is_late: bool = False
    """Whether nodes that others had confirmed were there when it joined first."""
    queues_work: bool = False
    """Whether it takes its next bundle while it has one."""

    @property
    def exclusion(self) -> str:
        """Why the node gets no work of this job while it is there; empty: it does."""
        return self.ban or self.refusal

    @property
    def has_returned(self) -> bool:
        """Whether it has done a bundle of this job: what it gives back may then be the item's
        fault.
        """
        return self.pace.items > 0


class ItemRun(msgspec.Struct, frozen=True, kw_only=True):
    """Items [start, start + items) that nobody has, and what became of them so far."""

    start: int
    items: int
    tries: int = 0
    """Leases under which they were given out."""
    failed_nodes: tuple[NodeId, ...] = ()
    """Nodes that gave them back, one entry a failure."""
    reason: str = ""
    """Reason of the newest failure."""

    def first(self, items: int) -> "ItemRun":
        """The run of its first items."""
        return msgspec.structs.replace(self, items=items)

    def rest(self, items: int) -> "ItemRun":
        """The run without its first items."""
        return msgspec.structs.replace(self, start=self.start + items, items=self.items - items)


class ReturnedResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result that waits for another one to compare it with."""

    node: NodeId
    lease: int
    token: str
    """Join token of the node, which no twin of it may share."""
    address: str = ""
    """Digest of the node's address, which no twin of it may share; empty: it is not known."""
    result: BundleResult
    claim: SignedContribution | None = None


class PartVote(msgspec.Struct, frozen=True, kw_only=True):
    """Another node's result of the items of a bundle that are checked."""

    result: ReturnedResult
    agreeing: tuple[int, ...] | None = None
    """Leases of the bundle's result and of earlier votes that agree with it; None: it is not
    compared yet.
    """


class OpenBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was given out and is not settled. While some node has it, nobody changes it."""

    run: ItemRun
    copies: int = 1
    """Results that are asked for: 2 where it is checked, one more for each that agrees with none.
    """
    results: tuple[ReturnedResult, ...] = ()
    """Results so far, of a bundle that is checked."""
    holders: tuple[NodeId, ...] = ()
    """Nodes that have it now."""
    comparing: int = 0
    """Lease of the result that is being compared with the earlier ones; 0: none is."""
    part: ItemRun | None = None
    """Items of it that other nodes do too, of a job whose rule is `CheckRule.PARTS`."""
    votes: tuple[PartVote, ...] = ()
    """Their results, in the order in which they came."""
    checkers: tuple[NodeId, ...] = ()
    """Nodes that do the part now."""
    failed_checkers: tuple[NodeId, ...] = ()
    """Nodes that gave the part back undone."""


class LeasedBundle(LeasedWork, frozen=True, kw_only=True):
    """A bundle that a node has, or gave back undone."""

    bundle: int
    is_part: bool = False
    """Whether it is only the part of the bundle that is checked."""
    due_at_ms: Milliseconds
    """When the lease ends."""


class FarmJob(LeasedJob, frozen=True, kw_only=True):
    """One farm job."""

    request: MapRequest
    bundle_items_most: int
    draw_seed: str = ""
    check_rule: CheckRule = CheckRule.COPIES
    terms: Terms = Terms()
    spec: SignedSpec | None = None
    """What the user signed of the work; it goes out with each lease."""
    phase: FarmPhase = FarmPhase.WORKING
    is_paused_for_budget: bool = False
    """Whether it paused because its budget was spent."""
    members: Mapping[NodeId, FarmMember] = {}
    next_item: int = 0
    """Items from here on were never given out."""
    waiting: tuple[ItemRun, ...] = ()
    """Runs that came back, in the order in which they go out."""
    next_bundle: int = 0
    bundles: Mapping[int, OpenBundle] = {}
    """Bundles that are not settled, by number."""
    leases: Mapping[NodeId, LeasedBundle] = {}
    """What nodes do now."""
    queued_leases: Mapping[NodeId, LeasedBundle] = {}
    """What they do next, of nodes that have a lease already. Their times begin once they are the
    first.
    """
    refusals: tuple[LeasedBundle, ...] = ()
    """Newest bundles that came back undone, of nodes that are given no more."""
    settled_items: int = 0
    failed_items: int = 0
    """Settled items that have no value."""
    units: int = 0
    """Work of the accepted results."""
    paid_units: int = 0
    """The same, with that of results that confirmed them."""
    late_cost_items: int = 0
    """Items that were done for nothing because of late names that others outvoted."""

    def leases_of(self, node: NodeId) -> tuple[LeasedBundle, ...]:
        """The leases of a node, in the order in which it does them."""
        pair = self.leases.get(node), self.queued_leases.get(node)
        return tuple(each for each in pair if each is not None)

    def all_leases(self) -> Iterator[tuple[NodeId, LeasedBundle]]:
        """Every lease with its node, those that are done next last."""
        yield from self.leases.items()
        yield from self.queued_leases.items()

    def lease_numbered(self, node: NodeId, number: int) -> LeasedBundle | None:
        """The lease of a node that has this number; None: the node has none such."""
        return next((each for each in self.leases_of(node) if each.lease == number), None)

    def lease_of_bundle(self, node: NodeId, bundle: int) -> LeasedBundle:
        """The lease by which a node has a bundle, or the part of it that is checked."""
        return next(each for each in self.leases_of(node) if each.bundle == bundle)

    def leased_run(self, leased_bundle: LeasedBundle) -> ItemRun:
        """The items that a lease is of."""
        open_bundle = self.bundles[leased_bundle.bundle]
        if leased_bundle.is_part and open_bundle.part is not None:
            return open_bundle.part
        return open_bundle.run

    @property
    def has_work_left(self) -> bool:
        """Whether items wait to be given out."""
        return bool(self.waiting) or self.next_item < self.request.items

    @property
    def untouched_items(self) -> int:
        """Items that were never given out."""
        return self.request.items - self.next_item
