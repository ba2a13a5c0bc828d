"""A job of items among nodes that come, go, hand back and fall silent: its journal by a seed."""

import random
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.work import work_events
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import StampedEvent
from hypergpu.assignment import Lease
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.units import Milliseconds
from tests.kinds.echo.core.events import (
    EchoCreated,
    ItemHandedBack,
    ItemReturned,
    LeasesDue,
)
from tests.kinds.echo.core.kind import ECHO
from tests.kinds.echo.core.state import ENDED, EchoJob

_STEP_MS_MOST, _LIMIT_MS = 400, 1_000
_NOW = Milliseconds(0)


class EchoWalk(NamedTuple):
    """What a walk left behind."""

    job: EchoJob
    journal: tuple[StampedEvent, ...]


def created_job(items: int, job_id: str = "job-e") -> EchoCreated:
    """The first event of a job."""
    texts = tuple(f"text {number}" for number in range(items))
    limit_ms = Milliseconds(_LIMIT_MS)
    return EchoCreated(
        at_ms=_NOW, job_id=JobId(job_id), owner=TokenId("token"), items=texts, limit_ms=limit_ms
    )


class _Walker:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.nodes = [NodeId(f"node-{number}") for number in range(self.dice.randint(2, 5))]
        first = created_job(self.dice.randint(1, 40))
        self.job: EchoJob = ECHO.transition(None, first).job
        self.journal: list[StampedEvent] = [first]

    def apply(self, event: StampedEvent) -> None:
        """Let an event happen, if it is legal."""
        if ECHO.rejection(self.job, event):
            return
        step = ECHO.transition(self.job, event)
        self.journal.append(event)
        self.job = step.job
        for command in step.commands:
            if isinstance(command, WriteRecord):
                self.apply(command.record)

    def drawn_event(self) -> StampedEvent:
        """Something that may happen now; work that comes back is likelier than the rest."""
        now_ms = Milliseconds(self.job.at_ms + self.dice.randint(0, _STEP_MS_MOST))
        node = self.dice.choice(self.nodes)
        pending_work = ECHO.pending(self.job, node)
        if pending_work and self.dice.random() < 0.6:
            lease = pending_work[0].command.assignment.lease
            return replace(self._end_of_lease(node, lease), at_ms=now_ms)
        return self.dice.choice(
            [
                work_events.NodeJoined(at_ms=now_ms, node=node),
                work_events.NodeJoined(at_ms=now_ms, node=node),
                work_events.NodeLost(at_ms=now_ms, node=node, reason="silent"),
                work_events.NodeDraining(at_ms=now_ms, node=node, reason="asked for"),
                work_events.NodePaused(at_ms=now_ms, node=node, reason="by its owner"),
                work_events.JobPaused(at_ms=now_ms),
                work_events.JobResumed(at_ms=now_ms),
                work_events.JobResumed(at_ms=now_ms),
                work_events.CoordinatorChanged(at_ms=now_ms, reason="started again"),
                LeasesDue(at_ms=now_ms),
            ]
        )

    def _end_of_lease(self, node: NodeId, lease: Lease) -> StampedEvent:
        if self.dice.random() < 0.2:
            number = lease.round
            return ItemHandedBack(
                at_ms=_NOW, node=node, number=number, lease=lease.number, reason="too hot"
            )
        text = self.job.items[lease.round]
        return ItemReturned(
            at_ms=_NOW, node=node, number=lease.round, lease=lease.number, text=text
        )


def walk(seed: int, events_most: int = 2_000) -> EchoWalk:
    """Walk until the job has ended."""
    walker = _Walker(seed)
    for _ in range(events_most):
        if walker.job.phase in ENDED:
            break
        walker.apply(walker.drawn_event())
    return EchoWalk(walker.job, tuple(walker.journal))
