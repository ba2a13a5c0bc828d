"""The registry half of the SQL journal: who may speak.

Reads that a write depends on happen inside its transaction, which is the only one that writes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Select, Table, bindparam, insert, select, update
from sqlalchemy.sql import Executable

from coordinator.shell.journal.memory_registry import NONCE_MAX
from coordinator.shell.journal.records import (
    CertificateRecord,
    NodeRecord,
    TokenRecord,
    UpdateCount,
)
from coordinator.shell.journal.sql.database import Database
from coordinator.shell.journal.sql.tables import CERTIFICATES, JOINS, NODES, NONCES, TOKENS
from hypergpu.ids import NodeId, TokenId
from hypergpu.wire.token import Role

_OF_NODE = update(NODES).where(NODES.c.node == bindparam("of_node"))
_SEEN = _OF_NODE.values(last_seen_ms=bindparam("seen_ms"))
_COUNTED = _OF_NODE.values(
    updates_accepted=NODES.c.updates_accepted + bindparam("accepted"),
    updates_refused=NODES.c.updates_refused + bindparam("refused"),
)


class SqlRegistry:
    """Nodes, nonces, tokens and certificates in tables."""

    def __init__(self, database: Database) -> None:
        self._registry = database

    def advance_nonce(self, node: NodeId, nonce: int) -> bool:
        if not 0 < nonce <= NONCE_MAX or self.nonce(node) >= nonce:
            return False
        of_node = NONCES.c.node == node
        with self._registry.writer() as connection:
            stored = connection.scalar(select(NONCES.c.nonce).where(of_node))
            if stored is None:
                connection.execute(insert(NONCES), {"node": node, "nonce": nonce})
                return True
            raised = update(NONCES).where(of_node, NONCES.c.nonce < nonce).values(nonce=nonce)
            return connection.execute(raised).rowcount == 1

    def nonce(self, node: NodeId) -> int:
        with self._registry.reader() as connection:
            return connection.scalar(select(NONCES.c.nonce).where(NONCES.c.node == node)) or 0

    def record_node(self, record: NodeRecord) -> None:
        values = msgspec.structs.asdict(record)
        renewed = ("public_key", "capabilities_json", "software", "last_seen_ms")
        renewal = update(NODES).where(NODES.c.node == record.node)
        with self._registry.writer() as connection:
            changed = connection.execute(renewal.values({key: values[key] for key in renewed}))
            if not changed.rowcount:
                connection.execute(insert(NODES), values)

    def record_activity(
        self, last_seen_ms: Mapping[NodeId, int], updates: Mapping[NodeId, UpdateCount]
    ) -> None:
        seen = [{"of_node": node, "seen_ms": seen_ms} for node, seen_ms in last_seen_ms.items()]
        counts = [{"of_node": node, **count._asdict()} for node, count in updates.items()]
        if not seen and not counts:
            return
        with self._registry.writer() as connection:
            if seen:
                connection.execute(_SEEN, seen)
            if counts:
                connection.execute(_COUNTED, counts)

    def set_revoked(self, node: NodeId, *, is_revoked: bool) -> bool:
        of_node = NODES.c.node == node
        return self._change(update(NODES).where(of_node).values(is_revoked=is_revoked))

    def node(self, node: NodeId) -> NodeRecord | None:
        rows = self._rows(select(NODES).where(NODES.c.node == node))
        return NodeRecord(**rows[0]) if rows else None

    def nodes(self) -> tuple[NodeRecord, ...]:
        rows = self._rows(select(NODES).order_by(NODES.c.first_seen_ms, NODES.c.node))
        return tuple(NodeRecord(**row) for row in rows)

    def add_token(self, record: TokenRecord) -> None:
        values = msgspec.structs.asdict(record) | {"role": record.role.value}
        self._insert(TOKENS, values)

    def token(self, token_id: TokenId) -> TokenRecord | None:
        rows = self._rows(select(TOKENS).where(TOKENS.c.token_id == token_id))
        return _token(rows[0]) if rows else None

    def tokens(self) -> tuple[TokenRecord, ...]:
        rows = self._rows(select(TOKENS).order_by(TOKENS.c.created_s, TOKENS.c.token_id))
        return tuple(_token(row) for row in rows)

    def revoke_token(self, token_id: TokenId) -> bool:
        of_token = TOKENS.c.token_id == token_id
        return self._change(update(TOKENS).where(of_token).values(is_revoked=True))

    def spend_token(self, token_id: TokenId, node: NodeId, now_s: int) -> bool:
        of_token = TOKENS.c.token_id == token_id
        with self._registry.writer() as connection:
            token = connection.execute(select(TOKENS).where(of_token)).one_or_none()
            if token is None or token.is_revoked:
                return False
            if connection.scalar(_join_query(token_id, node)):
                return True
            if 0 < token.expires_s <= now_s or token.uses_left == 0:
                return False
            connection.execute(
                update(TOKENS).where(of_token).values(uses_left=TOKENS.c.uses_left - 1)
            )
            connection.execute(insert(JOINS), {"token_id": token_id, "node": node})
            return True

    def has_joined(self, token_id: TokenId, node: NodeId) -> bool:
        with self._registry.reader() as connection:
            return connection.scalar(_join_query(token_id, node)) is not None

    def record_certificate(self, record: CertificateRecord) -> None:
        self._insert(CERTIFICATES, msgspec.structs.asdict(record))

    def certificates(self, node: NodeId) -> tuple[CertificateRecord, ...]:
        wanted = select(CERTIFICATES).where(CERTIFICATES.c.node == node)
        rows = self._rows(wanted.order_by(CERTIFICATES.c.issued_s, CERTIFICATES.c.serial))
        return tuple(CertificateRecord(**row) for row in rows)

    def _change(self, change: Executable) -> bool:
        with self._registry.writer() as connection:
            return connection.execute(change).rowcount == 1

    def _insert(self, table: Table, values: dict[str, Any]) -> None:
        with self._registry.writer() as connection:
            connection.execute(insert(table), values)

    def _rows(self, wanted: Executable) -> list[dict[str, Any]]:
        with self._registry.reader() as connection:
            return [dict(row) for row in connection.execute(wanted).mappings().all()]


def _join_query(token_id: TokenId, node: NodeId) -> Select[tuple[str]]:
    return select(JOINS.c.node).where(JOINS.c.token_id == token_id, JOINS.c.node == node)


def _token(row: dict[str, Any]) -> TokenRecord:
    return TokenRecord(**(row | {"role": Role(row["role"])}))
