"""A farm job that a test advances event by event."""

from typing import Any

from msgspec.structs import replace

from coordinator.core.farm.kind import FARM
from coordinator.core.farm.part_results import CompareResults
from coordinator.core.farm.state import CheckRule, FarmJob, FarmPhase
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import StampedEvent
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.farm.walk import comparison_of, created_job, join_event, result_of

ANN, BEN, CAT, DAN = (NodeId(f"node-{name}") for name in ("ann", "ben", "cat", "dan"))


class Farm:
    """A job that is advanced event by event; every one of them must be legal."""

    def __init__(self, items: int, *nodes: NodeId, **request: Any) -> None:
        queues_work = bool(request.pop("queues_work", False))
        self.job: FarmJob = FARM.transition(None, created_job(items, **request)).job
        self.journal: list[StampedEvent] = []
        self.commands: tuple[object, ...] = ()
        for node in nodes:
            self.happen(join_event(node, queues_work=queues_work))

    def happen(self, event: StampedEvent, after_ms: int = 1_000) -> None:
        """Let an event happen."""
        event = replace(event, at_ms=Milliseconds(self.job.at_ms + after_ms))
        assert not FARM.rejection(self.job, event), FARM.rejection(self.job, event)
        step = FARM.transition(self.job, event)
        self.job, self.commands = step.job, step.commands
        records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
        self.journal += [event, *records]
        for command in step.commands:
            if isinstance(command, CompareResults) and self.job.check_rule is CheckRule.PARTS:
                self.happen(comparison_of(self.job, command), after_ms=0)
                self.commands = (*step.commands, *self.commands)

    def return_result(self, node: NodeId, *, lie: str = "", after_ms: int = 1_000) -> None:
        """Have a node return its bundle."""
        self.happen(result_of(self.job, node, lie=lie), after_ms)

    def items_of(self, node: NodeId) -> int:
        """Items of the bundle that a node does now."""
        return self.job.leased_run(self.job.leases[node]).items

    def is_in(self, phase: FarmPhase) -> bool:
        """Whether the job is in a phase."""
        return self.job.phase is phase

    def records(self, kind: type) -> list[Any]:
        """Records of a kind so far."""
        return [event for event in self.journal if isinstance(event, kind)]
