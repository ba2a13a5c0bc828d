"""Nodes as this process sees them: control streams, last contact, draining, progress, counts.

Nothing here is persisted: after a restart nodes dial in again, and jobs know their members.
"""

import asyncio
from collections.abc import Iterable

from coordinator.shell.journal.records import UpdateCount
from coordinator.shell.translate import Capabilities, NodeProgress
from hypergpu.ids import NodeId
from hypergpu.process.clock import monotonic_ms
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2

_OUTBOX_MESSAGES = 256


class ControlStream:
    """A node's control stream."""

    def __init__(self, node: NodeId, capabilities: Capabilities, software: str) -> None:
        self.node = node
        self.capabilities = capabilities
        self.software = software
        self.outbox: asyncio.Queue[node_pb2.ControlResponse | None] = asyncio.Queue()

    def send(self, message: node_pb2.ControlResponse) -> None:
        """Queue a message; a node that takes none in is cut off, and told again when it is back."""
        if self.outbox.qsize() >= _OUTBOX_MESSAGES:
            self.close()
        else:
            self.outbox.put_nowait(message)

    @property
    def is_crowded(self) -> bool:
        """Whether the node is slow to take messages in: bulk has to wait."""
        return self.outbox.qsize() >= _OUTBOX_MESSAGES // 2

    def close(self) -> None:
        """End the stream after what is queued."""
        self.outbox.put_nowait(None)


class ConnectedNodes:
    """Every node that is connected or may come back."""

    def __init__(self) -> None:
        self.streams: dict[NodeId, ControlStream] = {}
        self.progress: dict[NodeId, NodeProgress] = {}
        self._heard_ms: dict[NodeId, Milliseconds] = {}
        self._draining: dict[NodeId, str] = {}
        self._names: dict[NodeId, str] = {}
        self.counts: dict[NodeId, UpdateCount] = {}
        """Updates that the journal does not know of yet."""

    def connect(self, stream: ControlStream) -> None:
        """A node opened its control stream. An older stream of the same node ends."""
        before = self.streams.get(stream.node)
        if before is not None:
            before.close()
        self.streams[stream.node] = stream
        self._names[stream.node] = stream.capabilities.name
        self._draining.pop(stream.node, None)
        self.mark_heard(stream.node)

    def disconnect(self, stream: ControlStream) -> None:
        """A stream ended. Its node is not lost yet: it may dial in again."""
        if self.streams.get(stream.node) is stream:
            del self.streams[stream.node]

    def mark_heard(self, node: NodeId) -> None:
        """Note a contact with the node."""
        self._heard_ms[node] = monotonic_ms()

    def expect(self, nodes: Iterable[NodeId], grace_ms: Milliseconds) -> None:
        """After a restart: these nodes may be silent for ``grace_ms`` longer than others."""
        for node in nodes:
            self._heard_ms.setdefault(node, Milliseconds(monotonic_ms() + grace_ms))

    def silent_ms(self, node: NodeId) -> Milliseconds | None:
        """Time since the last contact; None when this process never heard of the node."""
        heard_ms = self._heard_ms.get(node)
        return None if heard_ms is None else Milliseconds(max(0, monotonic_ms() - heard_ms))

    def overdue(self, limit_ms: Milliseconds) -> tuple[NodeId, ...]:
        """Nodes that are silent for more than ``limit_ms``, the longest silent first."""
        now_ms = monotonic_ms()
        silent = [
            (heard_ms, node)
            for node, heard_ms in self._heard_ms.items()
            if now_ms - heard_ms > limit_ms
        ]
        return tuple(node for _, node in sorted(silent))

    def forget(self, node: NodeId) -> None:
        """The node is lost or has left."""
        stream = self.streams.pop(node, None)
        if stream is not None:
            stream.close()
        for known in (self._heard_ms, self._draining, self._names, self.progress):
            known.pop(node, None)

    def drain(self, node: NodeId, reason: str) -> None:
        """The node takes no further work."""
        self._draining[node] = reason

    def drain_reason(self, node: NodeId) -> str:
        """Reason for which the node takes no further work; empty when it does."""
        return self._draining.get(node, "")

    @property
    def at_work(self) -> int:
        """How many nodes are connected and take work."""
        return sum(node not in self._draining for node in self.streams)

    def name_of(self, node: NodeId) -> str:
        """Name that the node's owner gave it; empty before it dials in."""
        return self._names.get(node, "")

    def send(self, node: NodeId, message: node_pb2.ControlResponse) -> None:
        """Send to a node if it is connected; what matters is sent again when it dials in."""
        stream = self.streams.get(node)
        if stream is not None:
            stream.send(message)

    def record_progress(self, node: NodeId, progress: NodeProgress) -> None:
        """Keep the newest progress of a node."""
        self.progress[node] = progress

    def count(self, node: NodeId, *, accepted: int = 0, refused: int = 0) -> None:
        """Add to the node's counts, which the journal gets later."""
        before = self.unstored_counts(node)
        counts = UpdateCount(before.accepted + accepted, before.refused + refused)
        self.counts[node] = counts
        if not any(counts):
            del self.counts[node]

    def unstored_counts(self, node: NodeId) -> UpdateCount:
        """Updates that the journal does not know of yet."""
        return self.counts.get(node, UpdateCount())

    def close(self) -> None:
        """End every stream."""
        for stream in self.streams.values():
            stream.close()
