"""A farm job among nodes that come, go, lie, hand back and fall silent: its journal by a seed."""

import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.events import (
    BundleAccepted,
    BundleHandedBack,
    BundleReturned,
    BundlesDue,
    ItemDropped,
    MapCreated,
    ResultsCompared,
)
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.part_results import CompareResults
from coordinator.core.farm.state import ENDED, CheckRule, FarmJob
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import StampedEvent
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.farm.bundles import Bundle, BundleResult
from hypergpu.farm.map_request import ComparisonRule, MapRequest, ResultComparison
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.packed_work import unpack_work
from hypergpu.units import Bytes, Milliseconds

_NOW = Milliseconds(0)
_STEP_MS_MOST = 4_000
_HONEST_BYTES = 100
MANIFEST = BlobRef(digest_of(b"manifest"), Bytes(100))
TOLERANT = ResultComparison(rule=ComparisonRule.TOLERANCE)


class FarmWalk(NamedTuple):
    """What a walk left behind."""

    job: FarmJob
    journal: tuple[StampedEvent, ...]


def created_job(
    items: int,
    job_id: str = "job-f",
    check_rule: CheckRule = CheckRule.PARTS,
    **request: Any,
) -> MapCreated:
    """The first event of a job."""
    map_request = MapRequest(item_kind="checksum", manifest=MANIFEST, items=items)
    map_request = replace(map_request, **request)
    map_request.check()
    return MapCreated(
        at_ms=_NOW,
        job_id=JobId(job_id),
        owner=TokenId("token"),
        request=map_request,
        item_kind=map_request.item_kind,
        items=items,
        unit=map_request.unit.value,
        bundle_items_most=1_000,
        draw_seed="secret",
        check_rule=check_rule,
    )


def result_of(
    job: FarmJob, node: NodeId, *, lie: str = "", failures: int = 0, place: int = 0
) -> BundleReturned:
    """The result of a bundle that a node has, by its place; two honest nodes give the same."""
    works = FARM.pending(job, node)
    assert len(works) > place, f"{node} has no such bundle"
    assignment = works[place].command.assignment
    bundle = unpack_work(assignment.work, job.request.work_kind, Bundle)
    run = f"{bundle.start} {bundle.items} {failures}"
    # The size of a blob tells the lie, so that parts of results can be compared.
    content = f"{lie}{run}".encode().ljust(_HONEST_BYTES + zlib.crc32(lie.encode()) % 10_000)
    return bundle_returned(
        node, assignment.lease, content=content, items=bundle.items - failures, failures=failures
    )


def bundle_returned(
    node: NodeId, lease: Lease, *, content: bytes, items: int, failures: int = 0
) -> BundleReturned:
    """The result of a bundle, whose blob has this content."""
    result = BundleResult(
        blob=BlobRef(digest_of(content), Bytes(len(content))),
        items=items,
        failures=failures,
        units=items,
    )
    return BundleReturned(
        at_ms=_NOW, node=node, bundle=lease.round, lease=lease.number, result=result
    )


def comparison_of(job: FarmJob, command: CompareResults) -> ResultsCompared:
    """What a comparison by the contents of `result_of` says."""
    open_bundle = job.bundles[command.bundle]
    results = [*open_bundle.results, *(vote.result for vote in open_bundle.votes)]
    newest = next(each for each in results if each.lease == command.lease)
    like_leases = tuple(
        each.lease
        for each in results[: results.index(newest)]
        if each.result.blob.size_bytes == newest.result.blob.size_bytes
    )
    return ResultsCompared(
        at_ms=_NOW, bundle=command.bundle, lease=command.lease, agreeing=like_leases
    )


def hand_back_of(
    job: FarmJob, node: NodeId, reason: str = "too hot", place: int = 0
) -> BundleHandedBack:
    """A bundle that a node has, given back undone."""
    leased_bundle = job.leases_of(node)[place]
    return BundleHandedBack(
        at_ms=_NOW, node=node, bundle=leased_bundle.bundle, lease=leased_bundle.lease, reason=reason
    )


def join_event(
    node: NodeId, at_ms: int = 0, token: str = "", *, queues_work: bool = False
) -> work_events.NodeJoined:
    """A node that is there, by a join token of its own unless one is named."""
    return work_events.NodeJoined(
        at_ms=Milliseconds(at_ms),
        node=node,
        token=token or f"token of {node}",
        queues_work=queues_work,
    )


def settled_items(journal: Iterable[StampedEvent]) -> Iterator[int]:
    """Positions of the items that rows settle, once for each time."""
    for event in journal:
        if isinstance(event, BundleAccepted):
            yield from range(event.start, event.start + event.items)
        elif isinstance(event, ItemDropped):
            yield event.item


class _FarmWalker:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        count = self.dice.randint(2, 7)
        self.nodes = [NodeId(f"node-{number}") for number in range(count)]
        self.liars = {node for node in self.nodes[2:] if self.dice.random() < 0.3}
        self.queuing = {node for node in self.nodes if self.dice.random() < 0.5}
        self.bad_items = {self.dice.randrange(400) for _ in range(self.dice.choice([0, 0, 3]))}
        first = created_job(
            self.dice.randint(1, 400),
            checked_permille=self.dice.choice([0, 30, 500]),
            bundle_ms=self.dice.choice([20_000, 4_000]),
            comparison=self.dice.choice([ResultComparison(), TOLERANT]),
            check_rule=self.dice.choice([CheckRule.COPIES, CheckRule.PARTS, CheckRule.PARTS]),
        )
        self.job: FarmJob = FARM.transition(None, first).job
        self.journal: list[StampedEvent] = [first]

    def apply(self, event: StampedEvent) -> None:
        """Let an event happen, if it is legal."""
        if FARM.rejection(self.job, event):
            return
        step = FARM.transition(self.job, event)
        self.journal.append(event)
        self.job = step.job
        for command in step.commands:
            if isinstance(command, WriteRecord):
                self.apply(command.record)

    def drawn_event(self) -> StampedEvent:
        """Something that may happen now; work that comes back is likelier than the rest."""
        now_ms = Milliseconds(self.job.at_ms + self.dice.randint(0, _STEP_MS_MOST))
        node = self.dice.choice(self.nodes)
        if comparisons := [
            command for command in FARM.outstanding(self.job) if isinstance(command, CompareResults)
        ]:
            return replace(self._comparison(comparisons[0]), at_ms=now_ms)
        if node in self.job.leases and self.dice.random() < 0.7:
            return replace(self._end_of_lease(node), at_ms=now_ms)
        token = f"token-{self.nodes.index(node) // 2}"
        joined_event = join_event(node, now_ms, token, queues_work=node in self.queuing)
        return self.dice.choice(
            [
                joined_event,
                joined_event,
                work_events.NodeLost(at_ms=now_ms, node=node, reason="silent"),
                work_events.NodeDraining(at_ms=now_ms, node=node, reason="asked for"),
                work_events.NodePaused(at_ms=now_ms, node=node, reason="by its owner"),
                work_events.JobPaused(at_ms=now_ms),
                work_events.JobResumed(at_ms=now_ms),
                work_events.JobResumed(at_ms=now_ms),
                work_events.CoordinatorChanged(at_ms=now_ms, reason="started again"),
                work_events.NodeReadmitted(at_ms=now_ms, node=node),
                BundlesDue(at_ms=now_ms),
            ]
        )

    def _comparison(self, command: CompareResults) -> ResultsCompared:
        if self.job.bundles[command.bundle].part is not None:
            return comparison_of(self.job, command)
        *earlier, newest = self.job.bundles[command.bundle].results
        like_leases = tuple(
            each.lease for each in earlier if each.result.blob == newest.result.blob
        )
        return ResultsCompared(
            at_ms=_NOW, bundle=command.bundle, lease=command.lease, agreeing=like_leases
        )

    def _end_of_lease(self, node: NodeId) -> StampedEvent:
        leases = self.job.leases_of(node)
        # The second comes first where the first is lost; the fence knows no order.
        place = self.dice.randrange(len(leases)) if self.dice.random() < 0.1 else 0
        run = self.job.leased_run(leases[place])
        is_bad = any(run.start <= item < run.start + run.items for item in self.bad_items)
        if is_bad or self.dice.random() < 0.05:
            return hand_back_of(self.job, node, place=place)
        lie = f"{node} lies" if node in self.liars else ""
        return result_of(self.job, node, lie=lie, place=place)


def walk(seed: int, events_most: int = 6_000) -> FarmWalk:
    """Walk until the job has ended."""
    walker = _FarmWalker(seed)
    for _ in range(events_most):
        if walker.job.phase in ENDED:
            break
        walker.apply(walker.drawn_event())
    return FarmWalk(walker.job, tuple(walker.journal))
