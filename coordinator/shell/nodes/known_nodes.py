"""Nodes that ever joined, and whether they are revoked."""

import threading
from collections.abc import Iterable

from coordinator.shell.store.journal.records import NodeRecord
from coordinator.shell.store.journal.registry import Registry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId


class KnownNodes:
    """Admits nodes and turns revoked ones away. `check` is memory only, the rest blocks."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._revoked = {one.node: one.is_revoked for one in registry.nodes()}

    def check(self, node: NodeId) -> None:
        """Reject a node that never joined or was revoked, whatever certificate it shows.

        Raises:
            HyperGPUError: NODE_UNKNOWN or NODE_REVOKED.
        """
        # One look-up in a dictionary needs no lock, and must not wait for a join's transaction.
        is_revoked = self._revoked.get(node)
        if is_revoked is None:
            raise HyperGPUError(Reason.NODE_UNKNOWN, f"node {node[:64]} never joined here")
        if is_revoked:
            raise HyperGPUError(Reason.NODE_REVOKED, f"node {node} was revoked")

    def revocations(self) -> dict[NodeId, bool]:
        """Every node that ever joined, and whether it is revoked."""
        return dict(self._revoked)

    def check_not_revoked(self, node: NodeId) -> None:
        """Reject a node that was revoked; one that joins for the first time passes.

        Raises:
            HyperGPUError: NODE_REVOKED.
        """
        if self._revoked.get(node, False):
            raise HyperGPUError(Reason.NODE_REVOKED, f"node {node} was revoked")

    def admit(self, record: NodeRecord) -> None:
        """Remember a node that joined."""
        with self._lock:
            self._registry.record_node(record)
            self._revoked.setdefault(record.node, record.is_revoked)

    def revoke(self, node: NodeId) -> None:
        """Turn a node away from now on; certificates that it holds are void.

        Raises:
            HyperGPUError: NODE_UNKNOWN.
        """
        self._set(node, is_revoked=True)

    def learn_revoked(self, nodes: Iterable[NodeId]) -> None:
        """Turn nodes away from now on that the registry has as revoked."""
        with self._lock:
            self._revoked.update(dict.fromkeys(nodes, True))

    def readmit(self, node: NodeId) -> None:
        """Take a revocation back.

        Raises:
            HyperGPUError: NODE_UNKNOWN.
        """
        self._set(node, is_revoked=False)

    def _set(self, node: NodeId, *, is_revoked: bool) -> None:
        with self._lock:
            if not self._registry.set_revoked(node, is_revoked=is_revoked):
                raise HyperGPUError(Reason.NODE_UNKNOWN, f"node {node[:64]} never joined here")
            self._revoked[node] = is_revoked
