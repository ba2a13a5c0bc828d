"""The registry half of the journal that forgets."""

import threading
from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.shell.journal.records import (
    CertificateRecord,
    NodeRecord,
    TokenRecord,
    UpdateCount,
)
from hypergpu.ids import NodeId, TokenId

NONCE_MAX = 2**63 - 1


class MemoryRegistry:
    """Nodes, nonces, tokens and certificates in dictionaries."""

    def __init__(self, lock: threading.RLock) -> None:
        self._registry_lock = lock
        self._nonces: dict[NodeId, int] = {}
        self._nodes: dict[NodeId, NodeRecord] = {}
        self._tokens: dict[TokenId, TokenRecord] = {}
        self._joins: set[tuple[TokenId, NodeId]] = set()
        self._certificates: dict[NodeId, list[CertificateRecord]] = {}

    def advance_nonce(self, node: NodeId, nonce: int) -> bool:
        with self._registry_lock:
            if not self._nonces.get(node, 0) < nonce <= NONCE_MAX:
                return False
            self._nonces[node] = nonce
            return True

    def nonce(self, node: NodeId) -> int:
        with self._registry_lock:
            return self._nonces.get(node, 0)

    def record_node(self, record: NodeRecord) -> None:
        with self._registry_lock:
            known = self._nodes.get(record.node)
            if known is not None:
                record = replace(
                    record,
                    first_seen_ms=known.first_seen_ms,
                    is_revoked=known.is_revoked,
                    updates_accepted=known.updates_accepted,
                    updates_refused=known.updates_refused,
                )
            self._nodes[record.node] = record

    def record_activity(
        self, last_seen_ms: Mapping[NodeId, int], updates: Mapping[NodeId, UpdateCount]
    ) -> None:
        with self._registry_lock:
            for node, seen_ms in last_seen_ms.items():
                if known := self._nodes.get(node):
                    self._nodes[node] = replace(known, last_seen_ms=seen_ms)
            for node, count in updates.items():
                if known := self._nodes.get(node):
                    self._nodes[node] = replace(
                        known,
                        updates_accepted=known.updates_accepted + count.accepted,
                        updates_refused=known.updates_refused + count.refused,
                    )

    def set_revoked(self, node: NodeId, *, is_revoked: bool) -> bool:
        with self._registry_lock:
            known = self._nodes.get(node)
            if known is None:
                return False
            self._nodes[node] = replace(known, is_revoked=is_revoked)
            return True

    def node(self, node: NodeId) -> NodeRecord | None:
        with self._registry_lock:
            return self._nodes.get(node)

    def nodes(self) -> tuple[NodeRecord, ...]:
        with self._registry_lock:
            return tuple(
                sorted(self._nodes.values(), key=lambda one: (one.first_seen_ms, one.node))
            )

    def add_token(self, record: TokenRecord) -> None:
        with self._registry_lock:
            self._tokens[record.token_id] = record

    def token(self, token_id: TokenId) -> TokenRecord | None:
        with self._registry_lock:
            return self._tokens.get(token_id)

    def tokens(self) -> tuple[TokenRecord, ...]:
        with self._registry_lock:
            return tuple(
                sorted(self._tokens.values(), key=lambda one: (one.created_s, one.token_id))
            )

    def revoke_token(self, token_id: TokenId) -> bool:
        with self._registry_lock:
            known = self._tokens.get(token_id)
            if known is None:
                return False
            self._tokens[token_id] = replace(known, is_revoked=True)
            return True

    def spend_token(self, token_id: TokenId, node: NodeId, now_s: int) -> bool:
        with self._registry_lock:
            known = self._tokens.get(token_id)
            if known is None or known.is_revoked:
                return False
            if (token_id, node) in self._joins:
                return True
            if 0 < known.expires_s <= now_s or known.uses_left == 0:
                return False
            if known.uses_left is not None:
                self._tokens[token_id] = replace(known, uses_left=known.uses_left - 1)
            self._joins.add((token_id, node))
            return True

    def has_joined(self, token_id: TokenId, node: NodeId) -> bool:
        with self._registry_lock:
            return (token_id, node) in self._joins

    def record_certificate(self, record: CertificateRecord) -> None:
        with self._registry_lock:
            self._certificates.setdefault(record.node, []).append(record)

    def certificates(self, node: NodeId) -> tuple[CertificateRecord, ...]:
        with self._registry_lock:
            return tuple(self._certificates.get(node, ()))
