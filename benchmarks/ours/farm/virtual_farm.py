"""A farm job in virtual time: the product's machine among nodes of any speed, line and honesty.

Nothing is computed and nothing waits: a bundle takes what its node's speed and line say. The same
seed gives the same journal.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.events import (
    BundleAccepted,
    BundleReturned,
    MapCreated,
    ResultsCompared,
)
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.part_results import CompareResults
from coordinator.core.farm.state import ENDED, CheckRule, FarmJob
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import AssignWork, CancelWork, ReportAt, WriteRecord
from coordinator.core.work.work_events import StampedEvent
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.farm.bundles import Bundle, BundleResult
from hypergpu.farm.map_request import MapRequest
from hypergpu.ids import Digest, JobId, NodeId, TokenId
from hypergpu.packed_work import unpack_work
from hypergpu.units import Bytes, Milliseconds

_MANIFEST = BlobRef(digest_of(b"a virtual manifest"), Bytes(100))
_RIGHT = ""


class VirtualLine(NamedTuple):
    """A node's line."""

    round_trip_ms: float = 0.0
    up_bits_per_s: float = float("inf")
    down_bits_per_s: float = float("inf")

    def fetch_ms(self, item_bytes: int, items: int) -> float:
        """Time from a lease until its items are there: its message, a ticket and the bytes."""
        return 2 * self.round_trip_ms + 8_000 * items * item_bytes / self.down_bits_per_s

    def send_ms(self, result_bytes: int, items: int) -> float:
        """Time from the end of the work until its result is in: a ticket, the bytes, the result."""
        return 2 * self.round_trip_ms + 8_000 * items * result_bytes / self.up_bits_per_s


class VirtualNode(NamedTuple):
    """A node of a virtual farm."""

    name: str
    item_ms: float
    line: VirtualLine = VirtualLine()
    strategy: "Strategy | None" = None
    """How it lies; None: it is honest."""
    queues_work: bool = False
    """Whether it takes a second bundle while it does one."""


class _OpenWork(NamedTuple):
    """A bundle that a node has."""

    node: NodeId
    items: int
    began_ms: float
    took_ms: float


class _NodeTimes(NamedTuple):
    """When a node's line and device are free, each of which does one thing at a time."""

    fetched_ms: float = 0.0
    computed_ms: float = 0.0
    sent_ms: float = 0.0

    def after_bundle(
        self, at_ms: float, node: VirtualNode, items: int, item_bytes: tuple[int, int]
    ) -> "_NodeTimes":
        """The times once a bundle that is leased now is in."""
        line, (input_bytes, result_bytes) = node.line, item_bytes
        fetched_ms = max(at_ms, self.fetched_ms) + line.fetch_ms(input_bytes, items)
        computed_ms = max(fetched_ms, self.computed_ms) + items * node.item_ms
        sent_ms = max(computed_ms, self.sent_ms) + line.send_ms(result_bytes, items)
        return _NodeTimes(fetched_ms, computed_ms, max(sent_ms, at_ms + 1.0))


class Answer(NamedTuple):
    """What a node answers for the items that it was given."""

    content: str = _RIGHT
    """Empty: the right result. Two results agree where their contents are equal."""
    wrong: range = range(0)
    """Positions of the items that are wrong; the others are right whatever the content."""

    def over(self, start: int, items: int) -> tuple[str, range]:
        """What it says of a run of the items: the lie, and where it lies."""
        first, last = max(start, self.wrong.start), min(start + items, self.wrong.stop)
        return (self.content, range(first, last)) if first < last else (_RIGHT, range(0))


class Moment(NamedTuple):
    """What a liar goes by."""

    dice: random.Random
    done_items: int
    """Items that it did before."""
    bundle: Bundle

    @property
    def positions(self) -> range:
        """Positions of the bundle's items."""
        return range(self.bundle.start, self.bundle.start + self.bundle.items)


Strategy = Callable[[Moment], Answer]


class FarmFigures(NamedTuple):
    """What came of a job."""

    phase: str
    done_ms: int
    ms_at_95: int
    """Time at which 95 % of the items were settled."""
    computed_items: int
    """Items of all bundles that nodes did, copies included."""
    wrong_accepted: int
    bans: int


class VirtualFarm:
    """One job, run to its end."""

    def __init__(
        self,
        items: int,
        nodes: Sequence[VirtualNode],
        seed: int,
        *,
        returns_after_ban: bool = False,
        result_bytes: int = 0,
        input_bytes: int = 0,
        **request: Any,
    ) -> None:
        """Take a fleet.

        Args:
            items: Of the job.
            nodes: All are there from the beginning, each by a token and a line of its own.
            seed: Keys the job's draws and the liars' dice.
            returns_after_ban: Whether a banned node comes back under a new name and token.
            result_bytes: Of one item.
            input_bytes: Of one item.
            request: Further fields of the request.
        """
        self._items = items
        self._nodes = {NodeId(node.name): node for node in nodes}
        self._dice = random.Random(seed)
        self._returns_after_ban = returns_after_ban
        self._item_bytes = input_bytes, result_bytes
        self._times: dict[NodeId, _NodeTimes] = {}
        self._heap: list[tuple[int, int, StampedEvent]] = []
        self._order = itertools.count()
        self._answers: dict[Digest, Answer] = {}
        self._done_before: dict[NodeId, int] = {}
        self._seen_bans: set[NodeId] = set()
        self._open: dict[int, _OpenWork] = {}
        """What nodes do, by lease."""
        self._figures = FarmFigures("", 0, 0, 0, 0, 0)
        first = MapCreated(
            at_ms=Milliseconds(0),
            job_id=JobId("job-00000000000f"),
            owner=TokenId("user"),
            request=replace(
                MapRequest(item_kind="checksum", manifest=_MANIFEST, items=items), **request
            ),
            item_kind="checksum",
            items=items,
            unit="items",
            bundle_items_most=1 << 20,
            draw_seed=f"secret {seed}",
            check_rule=CheckRule.PARTS,
        )
        self._job: FarmJob = FARM.transition(None, first).job
        for node in nodes:
            self._join(NodeId(node.name), 0)

    def run(self) -> FarmFigures:
        """Run the job to its end."""
        while self._heap and self._job.phase not in ENDED:
            at_ms, _, event = heapq.heappop(self._heap)
            self._happen(replace(event, at_ms=Milliseconds(at_ms)))
        return self._figures._replace(phase=self._job.phase.value, done_ms=self._job.at_ms)

    def _join(self, node: NodeId, at_ms: int) -> None:
        joined_event = work_events.NodeJoined(
            at_ms=Milliseconds(at_ms),
            node=node,
            token=f"token of {node}",
            address=node,
            queues_work=self._nodes[node].queues_work,
        )
        self._put(at_ms, joined_event)

    def _put(self, at_ms: float, event: StampedEvent) -> None:
        heapq.heappush(self._heap, (round(at_ms), next(self._order), event))

    def _happen(self, event: StampedEvent) -> None:
        if FARM.rejection(self._job, event):
            return
        if isinstance(event, BundleReturned):
            self._end_work(event.node, event.lease)
        step = FARM.transition(self._job, event)
        self._job = step.job
        for command in step.commands:
            self._perform(command)
        if self._returns_after_ban:
            self._come_back()

    def _perform(self, command: object) -> None:
        match command:
            case AssignWork():
                self._assign(command)
            case ReportAt(at_ms=at_ms, event=event):
                self._put(at_ms, event)
            case WriteRecord(record=BundleAccepted() as record):
                self._note_accepted(record)
            case CancelWork(lease=lease):
                self._stop(command.node, lease.number)
            case CompareResults():
                self._compare(command)
            case WriteRecord(record=record):
                self._happen(replace(record, at_ms=self._job.at_ms))
            case _:
                pass

    def _compare(self, command: CompareResults) -> None:
        """Compare a vote with the bundle's own result and the votes before it, over the part."""
        open_bundle = self._job.bundles[command.bundle]
        part = open_bundle.part
        if part is None:
            raise ValueError("results without a part are compared by their digests")
        results = [*open_bundle.results, *(vote.result for vote in open_bundle.votes)]
        claims = {
            each.lease: self._answers[each.result.blob.digest].over(part.start, part.items)
            for each in results
        }
        place = [each.lease for each in results].index(command.lease)
        like_leases = tuple(
            each.lease for each in results[:place] if claims[each.lease] == claims[command.lease]
        )
        event = ResultsCompared(
            at_ms=Milliseconds(0), bundle=command.bundle, lease=command.lease, agreeing=like_leases
        )
        self._put(self._job.at_ms, event)

    def _stop(self, node: NodeId, lease: int) -> None:
        """Count only what was done of a lease that is void. What its node has beside it comes when
        it would have come: earlier would be fairer to leases ahead.
        """
        work = self._end_work(node, lease)
        if work is not None:
            rest_share = min(1.0, 1 - (self._job.at_ms - work.began_ms) / work.took_ms)
            computed_items = self._figures.computed_items - int(work.items * max(0.0, rest_share))
            self._figures = self._figures._replace(computed_items=computed_items)

    def _end_work(self, node: NodeId, lease: int) -> _OpenWork | None:
        """Note that a node does not have a bundle any more: without another one it is free."""
        work = self._open.pop(lease, None)
        if all(each.node != node for each in self._open.values()):
            self._times.pop(node, None)
        return work

    def _note_accepted(self, record: BundleAccepted) -> None:
        figures, answer = self._figures, self._answers[record.blob.digest]
        wrong_accepted = figures.wrong_accepted + len(answer.wrong)
        self._figures = figures._replace(wrong_accepted=wrong_accepted)
        settled_items = self._job.settled_items
        if not figures.ms_at_95 and settled_items >= 0.95 * self._items:
            self._figures = self._figures._replace(ms_at_95=self._job.at_ms)

    def _assign(self, command: AssignWork) -> None:
        node = self._nodes[command.node]
        assignment = command.assignment
        bundle = unpack_work(assignment.work, assignment.work.kind, Bundle)
        before = self._done_before.get(command.node, 0)
        self._done_before[command.node] = before + bundle.items
        answer = Answer()
        if node.strategy is not None:
            answer = node.strategy(Moment(self._dice, before, bundle))
        content = f"{bundle.start} {bundle.items} {answer}".encode()
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        self._answers[blob.digest] = answer
        result = BundleResult(blob=blob, items=bundle.items, units=bundle.items)
        before_times = self._times.get(command.node, _NodeTimes())
        times = before_times.after_bundle(self._job.at_ms, node, bundle.items, self._item_bytes)
        self._times[command.node] = times
        began_ms = max(float(self._job.at_ms), before_times.computed_ms)
        work = _OpenWork(command.node, bundle.items, began_ms, times.sent_ms - began_ms)
        self._open[assignment.lease.number] = work
        computed_items = self._figures.computed_items + bundle.items
        self._figures = self._figures._replace(computed_items=computed_items)
        self._put(
            times.sent_ms,
            BundleReturned(
                at_ms=Milliseconds(0),
                node=command.node,
                bundle=assignment.lease.round,
                lease=assignment.lease.number,
                result=result,
            ),
        )

    def _come_back(self) -> None:
        for node, member in self._job.members.items():
            if member.ban and node not in self._seen_bans:
                self._seen_bans.add(node)
                self._figures = self._figures._replace(bans=self._figures.bans + 1)
                name = NodeId(f"{node}'")
                self._nodes[name] = self._nodes[node]._replace(name=name)
                self._join(name, self._job.at_ms + 1_000)
