"""A job of each kind whose two nodes are at work, and what may become of their work."""

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from coordinator.core.farm.kind import FARM
from coordinator.core.training.kind import TRAINING
from coordinator.core.work.kind import WorkKind
from coordinator.core.work.work_events import NodeJoined, StampedEvent
from hypergpu.assignment import Lease
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.echo.core.events import ItemReturned
from tests.kinds.echo.core.kind import ECHO
from tests.kinds.echo.walk import created_job
from tests.kinds.farm.walk import bundle_returned
from tests.kinds.farm.walk import created_job as created_farm
from tests.unit.job_states import ALICE, BOB, training, update_event

NOW_MS = Milliseconds(500)


class AtWork(NamedTuple):
    """A job of one kind at which Alice and Bob are at work."""

    kind: WorkKind
    job: Any
    result: Callable[[Any, NodeId, Lease], StampedEvent]
    """Event of the result of a node's work: ``(job, node, lease) -> event``."""

    def after(self, *happened: StampedEvent) -> "AtWork":
        """The job after these events, each of which must be legal."""
        job = self.job
        for event in happened:
            assert not self.kind.rejection(job, event), self.kind.rejection(job, event)
            job = self.kind.transition(job, event).job
        return self._replace(job=job)

    def lease_of(self, node: NodeId) -> Lease:
        """The lease that the work of a node is under which it does now."""
        works = self.kind.pending(self.job, node)
        assert works, f"{node} has no work"
        lease: Lease = works[0].command.assignment.lease
        assert lease.number == works[0].lease
        return lease


def echo_at_work() -> AtWork:
    """Two of five items are out."""
    job = ECHO.transition(None, created_job(5)).job
    at_work = AtWork(ECHO, job, _item_returned)
    return at_work.after(
        NodeJoined(at_ms=Milliseconds(20), node=ALICE),
        NodeJoined(at_ms=Milliseconds(30), node=BOB),
    )


def farm_at_work() -> AtWork:
    """Two bundles of a hundred items are out."""
    job = FARM.transition(None, created_farm(100)).job
    at_work = AtWork(FARM, job, _bundle_returned)
    return at_work.after(
        NodeJoined(at_ms=Milliseconds(20), node=ALICE),
        NodeJoined(at_ms=Milliseconds(30), node=BOB),
    )


def training_at_work() -> AtWork:
    """Both shards of the first round are out."""
    return AtWork(TRAINING, training(), _update_received)


def _item_returned(job: Any, node: NodeId, lease: Lease) -> StampedEvent:
    text = job.items[lease.round]
    return ItemReturned(at_ms=NOW_MS, node=node, number=lease.round, lease=lease.number, text=text)


def _bundle_returned(job: Any, node: NodeId, lease: Lease) -> StampedEvent:
    open_bundle = job.bundles.get(lease.round)
    items = open_bundle.run.items if open_bundle is not None else 1
    event = bundle_returned(node, lease, content=f"{lease.round}".encode(), items=items)
    return replace(event, at_ms=NOW_MS)


def _update_received(_: Any, node: NodeId, lease: Lease) -> StampedEvent:
    return update_event(node, round_=lease.round, lease=lease.number, at_ms=NOW_MS)
