"""Speeds of all nodes as this process remembers them, stored by node. The rules are those of
`coordinator.core.network.known_speed`.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.network.known_speed import (
    DAYS_KEPT,
    SpeedRecord,
    SpeedSource,
    recalled_speed,
    record_speed,
)
from coordinator.core.network.reading import Estimate
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.clock import monotonic_ms, unix_ms
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

NODES_MOST = 10_000
"""Nodes whose speeds are kept; the one that was not measured for longest makes room."""
_EMPTY = SpeedRecord()
_DAY_MS = 86_400_000


def device_key(stream: ControlStream) -> str:
    """Digest of all that the time of a step follows from, but for the work: what a node says of its
    device, its owner's limits and its versions.
    """
    capabilities = stream.capabilities
    parts = (
        capabilities.device,
        capabilities.device_name,
        capabilities.worker,
        capabilities.torch,
        stream.software,
    )
    return blake3(msgspec.json.encode((*parts, sorted(capabilities.caps.items())))).hexdigest(16)


class FleetSpeeds:
    """Speeds by node's key.

    Args:
        records: Those of an earlier process.
        clock: Unix milliseconds.
    """

    def __init__(
        self,
        records: Mapping[NodeId, SpeedRecord] | None = None,
        clock: Callable[[], Milliseconds] = unix_ms,
    ) -> None:
        by_age = sorted((records or {}).items(), key=lambda each: each[1].newest_ms)
        self._records = dict(by_age)
        """The one that was measured last comes last."""
        self._clock = clock
        self._changed: dict[NodeId, None] = {}
        self.forgotten: set[NodeId] = set()
        """Nodes whose stored records are to be removed."""

    def recall(self, node: NodeId, source: SpeedSource) -> Estimate:
        """Time of a step, in microseconds and of this process's clock; no observations: unknown."""
        now_ms = self._clock()
        speed = recalled_speed(self._records.get(node, _EMPTY), source, now_ms)
        at_ms = Milliseconds(min(0, speed.at_ms - now_ms) + monotonic_ms())
        return replace(speed, at_ms=at_ms) if speed.count else speed

    def record(self, node: NodeId, source: SpeedSource, step_us: Estimate) -> None:
        """Keep the time of a step as it was just measured."""
        record = self._records.pop(node, _EMPTY)
        self._records[node] = record_speed(record, source, step_us, self._clock())
        self._changed[node] = None
        self.forgotten.discard(node)
        while len(self._records) > NODES_MOST:
            self.forget(next(iter(self._records)))

    def forget(self, node: NodeId) -> None:
        """Keep nothing of the node."""
        if self._records.pop(node, None) is not None:
            self._changed.pop(node, None)
            self.forgotten.add(node)

    def forget_old(self) -> None:
        """Keep nothing of nodes that were not measured for days."""
        oldest_ms = self._clock() - DAYS_KEPT * _DAY_MS
        for node in [n for n, each in self._records.items() if each.newest_ms < oldest_ms]:
            self.forget(node)

    def records_to_store(self, most: int) -> dict[NodeId, SpeedRecord]:
        """Records that changed since they were stored, at most so many."""
        return {node: self._records[node] for node in list(self._changed)[:most]}

    def mark_stored(
        self, records: Mapping[NodeId, SpeedRecord], removed: Iterable[NodeId] = ()
    ) -> None:
        """These are durable, and those are removed."""
        self.forgotten -= frozenset(removed)
        for node, record in records.items():
            if self._records.get(node) is record:
                self._changed.pop(node, None)
