"""Health of all nodes as this process keeps it: fed by rounds, updates and readings, looked at once
a minute, stored by node. `coordinator.core.hub.health` has the rules.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.hub.health import (
    Exclusion,
    FleetMedians,
    HealthEvidence,
    HealthHistory,
    HealthParts,
    HealthRecord,
    after_line,
    after_minute,
    after_rate,
    after_round,
    arrival_sample,
    exclusion,
    fleet_medians,
    health_history,
    health_parts,
    health_reason,
)
from coordinator.core.network.line import likely_loss
from coordinator.core.network.reading import NodeReading
from coordinator.shell.translate import NodeProgress
from hypergpu.clock import unix_s
from hypergpu.ids import NodeId

MINUTE_S = 60
FORGOTTEN_DAYS = 30
STORED_A_MINUTE = 500
"""Records that are written at a time; the one that was written longest ago goes first."""
SLICE_NODES = 500
"""Nodes that are looked at before others get their turn in the event loop: 10 to 15 ms."""
FEW_NODES = 500
"""The medians of a larger fleet are made anew each minute only."""

_NEW = HealthRecord()


class NodeHealth(NamedTuple):
    """A node's health as it is shown."""

    parts: HealthParts
    exclusion: Exclusion | None
    history: HealthHistory

    @property
    def reason(self) -> str:
        """What lowers it most, for people."""
        return health_reason(self.parts, self.exclusion)


class FleetHealth:
    """Records of all nodes, by key.

    Args:
        stored: Those of an earlier process.
        clock: Unix seconds.
    """

    def __init__(
        self,
        stored: Mapping[NodeId, HealthRecord] | None = None,
        clock: Callable[[], int] = unix_s,
    ) -> None:
        self._records = dict(stored or {})
        self._clock = clock
        self._medians: FleetMedians | None = None
        self._stored_minutes: dict[NodeId, int] = {}
        self._ranks: dict[NodeId, float] = {}
        self._excluded: frozenset[NodeId] = frozenset()
        self.forgotten: set[NodeId] = set()
        """Nodes whose stored records are to be removed."""

    def record_rate(self, node: NodeId, key: str, samples_per_s: float) -> None:
        """Add the speed of an accepted update.

        Args:
            node: Its sender.
            key: What the node worked on: only nodes with the same work are compared.
            samples_per_s: As the sender states.
        """
        self._change(node, after_rate(self._record(node), key, samples_per_s))

    def record_evidence(
        self, evidence: Iterable[HealthEvidence], progress: Mapping[NodeId, NodeProgress]
    ) -> None:
        """Add what durable events say of nodes.

        Args:
            evidence: By `health_evidence`.
            progress: The newest of each node.
        """
        now_s = self._clock()
        for each in evidence:
            newest, lease = progress.get(each.node), each.participant.lease
            has_progress = newest is not None and newest.lease == lease and newest.steps_done > 0
            arrival = arrival_sample(
                each.participant, has_progress=has_progress, is_interrupted=each.is_interrupted
            )
            record = after_round(self._record(each.node), arrival, each.quality, now_s)
            self._change(each.node, record)

    async def look(
        self, connected: Iterable[NodeId], readings: Mapping[NodeId, NodeReading]
    ) -> bool:
        """Add a minute to every node's history, a slice of a large fleet at a time.

        Args:
            connected: Nodes that are there.
            readings: Of nodes that were here since this process began.

        Returns:
            Whether another node is excluded than a minute before, or one less.
        """
        now_s, present = self._clock(), frozenset(connected)
        for node, reading in readings.items():
            up, down = reading.up_bits_per_s, reading.down_bits_per_s
            record = after_line(
                self._record(node),
                up.mean if up.count else 0.0,
                down.mean if down.count else 0.0,
                likely_loss(reading),
            )
            self._records[node] = record
        self._medians = None
        minute = now_s // MINUTE_S
        nodes = [*self._records, *(present - self._records.keys())]
        for first in range(0, len(nodes), SLICE_NODES):
            await asyncio.sleep(0)
            for node in nodes[first : first + SLICE_NODES]:
                self._add_minute(node, minute, is_connected=node in present)
        self._forget_old(minute)
        before, self._excluded = self._excluded, self._excluded_at(now_s)
        return before != self._excluded

    def _add_minute(self, node: NodeId, minute: int, *, is_connected: bool) -> None:
        value = self.parts(node).value
        record = after_minute(self._record(node), minute, value, is_connected=is_connected)
        if is_connected or not record.seen_minute:
            record = replace(record, seen_minute=minute)
        self._records[node] = record
        self._ranks[node] = value

    def parts(self, node: NodeId) -> HealthParts:
        """The parts of a node's health now; those of a newcomer for one that is not known."""
        return health_parts(self._record(node), self._fleet(), self._clock())

    def exclusion(self, node: NodeId) -> Exclusion | None:
        """The node's exclusion now; None: there is none."""
        return exclusion(self._record(node), self._clock())

    def rank(self, node: NodeId) -> float:
        """The health of the newest minute, by which nodes are asked: cheap, whatever the fleet."""
        return self._ranks.get(node, HealthParts().value)

    def health(self, node: NodeId) -> NodeHealth:
        """A node's health now, with its history."""
        return NodeHealth(
            self.parts(node), self.exclusion(node), health_history(self._record(node))
        )

    @property
    def records(self) -> Mapping[NodeId, HealthRecord]:
        """Every node's."""
        return self._records

    def records_to_store(self, most: int) -> dict[NodeId, HealthRecord]:
        """Records that changed since they were stored, at most so many, the oldest first."""
        changed_nodes = [
            node
            for node, record in self._records.items()
            if self._stored_minutes.get(node, -1) < record.minute
        ]
        changed_nodes.sort(key=lambda node: self._stored_minutes.get(node, -1))
        return {node: self._records[node] for node in changed_nodes[:most]}

    def mark_stored(
        self, records: Mapping[NodeId, HealthRecord], removed: Iterable[NodeId] = ()
    ) -> None:
        """These are durable, and those are removed."""
        self.forgotten -= frozenset(removed)
        for node, record in records.items():
            self._stored_minutes[node] = record.minute

    def _record(self, node: NodeId) -> HealthRecord:
        return self._records.get(node, _NEW)

    def _change(self, node: NodeId, record: HealthRecord) -> None:
        self._records[node] = record
        if len(self._records) <= FEW_NODES:
            self._medians = None

    def _fleet(self) -> FleetMedians:
        if self._medians is None:
            self._medians = fleet_medians(self._records.values())
        return self._medians

    def _excluded_at(self, now_s: int) -> frozenset[NodeId]:
        return frozenset(
            node for node, record in self._records.items() if exclusion(record, now_s) is not None
        )

    def _forget_old(self, minute: int) -> None:
        oldest = minute - FORGOTTEN_DAYS * 24 * 60
        for node in [n for n, record in self._records.items() if record.seen_minute < oldest]:
            for node_map in (self._records, self._ranks, self._stored_minutes):
                node_map.pop(node, None)
            self.forgotten.add(node)
