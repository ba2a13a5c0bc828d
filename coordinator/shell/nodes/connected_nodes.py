"""Nodes that are connected or may come back: contacts, drains, pauses, counts."""

from collections.abc import Callable, Iterable, Mapping

from coordinator.shell.nodes.control_stream import BlobRoom, ControlStream
from coordinator.shell.store.journal.records import UpdateCount
from coordinator.shell.translate import NodeProgress
from hypergpu.clock import monotonic_ms
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2


class ConnectedNodes:
    """Every node that is connected or may come back.

    Args:
        pauses: Nodes that are paused, with the reason.
        trust_labels: Labels that operators gave nodes.
    """

    def __init__(
        self,
        pauses: Mapping[NodeId, str] | None = None,
        trust_labels: Mapping[NodeId, frozenset[str]] | None = None,
    ) -> None:
        self._pauses = dict(pauses or {})
        self._trust_labels = dict(trust_labels or {})
        self.streams: dict[NodeId, ControlStream] = {}
        self.progress: dict[NodeId, NodeProgress] = {}
        self._room = BlobRoom()
        self._heard_ms: dict[NodeId, Milliseconds] = {}
        self._draining: dict[NodeId, str] = {}
        self._names: dict[NodeId, str] = {}
        self._direct: set[NodeId] = set()
        self.counts: dict[NodeId, UpdateCount] = {}
        """Updates that the journal does not know of yet."""
        self.on_stream_end: list[Callable[[NodeId], None]] = []
        """Called when a node's stream ends, or another one takes its place."""
        self.on_stream_begin: list[Callable[[NodeId], None]] = []
        """Called when a node has dialled in."""
        self.on_label_change: list[Callable[[NodeId], None]] = []
        """Called when an operator has changed a node's labels."""

    def known_address(self, node: NodeId) -> str:
        """Address by which the node unpacks others; empty: it is told whole ones."""
        stream = self.streams.get(node)
        return "" if stream is None else stream.known_address

    def connect(self, stream: ControlStream) -> None:
        """A node opened its control stream. An older stream of the same node ends."""
        before = self.streams.get(stream.node)
        if before is not None:
            before.close()
            self._tell_stream_end(stream.node)
        stream.room = self._room
        self.streams[stream.node] = stream
        self._direct.discard(stream.node)
        if not stream.is_watched:
            self._direct.add(stream.node)
        self._names[stream.node] = stream.capabilities.name
        self._draining.pop(stream.node, None)
        self.mark_heard(stream.node)
        for act in self.on_stream_begin:
            act(stream.node)

    def disconnect(self, stream: ControlStream) -> None:
        """A stream ended. Its node is not lost yet: it may dial in again."""
        stream.release_room()
        if self.streams.get(stream.node) is stream:
            del self.streams[stream.node]
            self._direct.discard(stream.node)
            self._tell_stream_end(stream.node)
            if stream.is_watched or not stream.pace.is_usual:
                self.mark_heard(stream.node)

    @property
    def direct_streams(self) -> int:
        """Streams that no gateway holds: their heartbeats come here."""
        return len(self._direct)

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
        if heard_ms is not None and self._is_watched(node):
            return Milliseconds(0)
        return None if heard_ms is None else Milliseconds(max(0, monotonic_ms() - heard_ms))

    def _is_watched(self, node: NodeId) -> bool:
        stream = self.streams.get(node)
        return stream is not None and stream.is_watched

    def overdue(self, limit_ms: Milliseconds) -> tuple[NodeId, ...]:
        """Nodes that are silent for too long, the longest silent first.

        Args:
            limit_ms: Silence that is borne of nodes whose heartbeats come as often as usual.
        """
        now_ms = monotonic_ms()
        silent = [
            (heard_ms, node)
            for node, heard_ms in self._heard_ms.items()
            if self.is_overdue(node, limit_ms, now_ms)
        ]
        return tuple(node for _, node in sorted(silent))

    def is_overdue(self, node: NodeId, limit_ms: Milliseconds, now_ms: Milliseconds) -> bool:
        """Whether `overdue` would name this node."""
        silent_ms = now_ms - self._heard_ms.get(node, now_ms)
        return silent_ms > limit_ms and not self._is_borne(node, silent_ms)

    def _is_borne(self, node: NodeId, silent_ms: int) -> bool:
        """Whether the silence of a node is in the order of its stream."""
        stream = self.streams.get(node)
        if stream is None:
            return False
        limit_ms = stream.silence_limit_ms
        return limit_ms is None or silent_ms <= limit_ms

    def forget(self, node: NodeId) -> None:
        """The node is lost or has left."""
        stream = self.streams.pop(node, None)
        self._direct.discard(node)
        if stream is not None:
            stream.close()
            self._tell_stream_end(node)
        for node_map in (self._heard_ms, self._draining, self._names, self.progress):
            node_map.pop(node, None)

    def _tell_stream_end(self, node: NodeId) -> None:
        for act in self.on_stream_end:
            act(node)

    def drain(self, node: NodeId, reason: str) -> None:
        """The node takes no further work."""
        self._draining[node] = reason

    def drain_reason(self, node: NodeId) -> str:
        """Reason for which the node takes no further work; empty when it does."""
        return self._draining.get(node, "")

    def pause(self, node: NodeId, reason: str) -> None:
        """The node takes no work until its pause ends, also when it dials in again."""
        self._pauses[node] = reason

    def end_pause(self, node: NodeId) -> None:
        """The node takes work again."""
        self._pauses.pop(node, None)

    def pause_reason(self, node: NodeId) -> str:
        """Reason for which the node is paused; empty when it is not."""
        return self._pauses.get(node, "")

    def pause_reasons(self, nodes: Iterable[NodeId]) -> dict[NodeId, str]:
        """Those of the nodes that are paused, with the reason."""
        return {node: self._pauses[node] for node in nodes if node in self._pauses}

    def trust_labels(self, node: NodeId) -> frozenset[str]:
        """Labels that operators gave the node, which it does not state itself."""
        return self._trust_labels.get(node, frozenset())

    def set_trust_labels(self, node: NodeId, labels: frozenset[str]) -> None:
        """The node has these labels from now on."""
        self._trust_labels[node] = labels
        for act in self.on_label_change:
            act(node)

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

    def count(self, node: NodeId, *, accepted: int = 0, rejected: int = 0) -> None:
        """Add to the node's counts, which the journal gets later."""
        before = self.unstored_counts(node)
        counts = UpdateCount(before.accepted + accepted, before.rejected + rejected)
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
