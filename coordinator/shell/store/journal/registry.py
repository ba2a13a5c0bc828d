"""Nodes, nonces and tokens in the journal's database. Calls block until durable."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Select, Table, bindparam, delete, insert, select, update
from sqlalchemy.sql import Executable

from coordinator.core.hub.health import HealthRecord
from coordinator.core.network.known_speed import SpeedRecord
from coordinator.shell.store.journal.database import Database
from coordinator.shell.store.journal.records import (
    NodeRecord,
    SpecKeyRecord,
    TokenRecord,
    UpdateCount,
)
from coordinator.shell.store.journal.schema import (
    HEALTH,
    JOINS,
    NODES,
    NONCES,
    PAUSES,
    SPEC_KEYS,
    SPEEDS,
    TOKENS,
    TRUST_LABELS,
)
from hypergpu.ids import NodeId, TokenId
from hypergpu.wire.credentials import Role

NONCE_MAX = 2**63 - 1
_UPDATE_NODE = update(NODES).where(NODES.c.node == bindparam("of_node"))
_RECORD_CONTACT = _UPDATE_NODE.values(last_seen_ms=bindparam("seen_ms"))
_ADD_COUNTS = _UPDATE_NODE.values(
    updates_accepted=NODES.c.updates_accepted + bindparam("accepted"),
    updates_rejected=NODES.c.updates_rejected + bindparam("rejected"),
)

_Record = TypeVar("_Record", HealthRecord, SpeedRecord)


class Registry:
    """Nodes, nonces and tokens in tables. Calls block until durable; any thread may call."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def advance_nonce(self, node: NodeId, nonce: int) -> bool:
        """Raise the node's high-water mark to ``nonce``, durably; False when it is not above it."""
        if not 0 < nonce <= NONCE_MAX:
            return False
        is_of_node = NONCES.c.node == node
        with self._database.writer() as connection:
            stored_nonce = connection.scalar(select(NONCES.c.nonce).where(is_of_node))
            if stored_nonce is None:
                connection.execute(insert(NONCES), {"node": node, "nonce": nonce})
            elif stored_nonce < nonce:
                connection.execute(update(NONCES).where(is_of_node).values(nonce=nonce))
        return stored_nonce is None or stored_nonce < nonce

    def nonce(self, node: NodeId) -> int:
        """The node's high-water mark; 0 before its first."""
        with self._database.reader() as connection:
            return connection.scalar(select(NONCES.c.nonce).where(NONCES.c.node == node)) or 0

    def record_node(self, record: NodeRecord) -> None:
        """Add a node, or renew its key, capabilities, software and time of last contact.

        First contact, revocation and counters of a known node stay as they are.
        """
        values = msgspec.structs.asdict(record)
        renewed_columns = ("public_key", "capabilities_json", "software", "last_seen_ms")
        renewal = update(NODES).where(NODES.c.node == record.node)
        with self._database.writer() as connection:
            outcome = connection.execute(
                renewal.values({key: values[key] for key in renewed_columns})
            )
            if not outcome.rowcount:
                connection.execute(insert(NODES), values)

    def record_activity(
        self, last_seen_ms: Mapping[NodeId, int], updates: Mapping[NodeId, UpdateCount]
    ) -> None:
        """Store when nodes were last heard of and add to their counters, all or nothing.

        Unknown nodes are passed over.
        """
        contacts = [{"of_node": node, "seen_ms": seen_ms} for node, seen_ms in last_seen_ms.items()]
        counts = [{"of_node": node, **count._asdict()} for node, count in updates.items()]
        if not contacts and not counts:
            return
        with self._database.writer() as connection:
            for statement, rows in ((_RECORD_CONTACT, contacts), (_ADD_COUNTS, counts)):
                if rows:
                    connection.execute(statement, rows)

    def set_revoked(self, node: NodeId, *, is_revoked: bool) -> bool:
        """Revoke or re-admit a node; False when it is unknown."""
        return self._change(update(NODES).where(NODES.c.node == node).values(is_revoked=is_revoked))

    def set_pause(self, node: NodeId, reason: str) -> None:
        """Keep the reason for which a node is paused; empty: it is not."""
        with self._database.writer() as connection:
            connection.execute(delete(PAUSES).where(PAUSES.c.node == node))
            if reason:
                connection.execute(insert(PAUSES), {"node": node, "reason": reason})

    def pauses(self) -> dict[NodeId, str]:
        """Nodes that are paused, with the reason."""
        return {NodeId(row["node"]): row["reason"] for row in self._rows(select(PAUSES))}

    def set_trust_labels(self, node: NodeId, labels: Collection[str]) -> None:
        """Keep the labels that an operator gave a node, in place of those before."""
        rows = [{"node": node, "label": label} for label in sorted(labels)]
        with self._database.writer() as connection:
            connection.execute(delete(TRUST_LABELS).where(TRUST_LABELS.c.node == node))
            if rows:
                connection.execute(insert(TRUST_LABELS), rows)

    def trust_labels(self) -> dict[NodeId, frozenset[str]]:
        """Nodes that operators gave labels, with these."""
        labels: dict[NodeId, frozenset[str]] = {}
        for row in self._rows(select(TRUST_LABELS)):
            node = NodeId(row["node"])
            labels[node] = labels.get(node, frozenset()) | {row["label"]}
        return labels

    def store_health(
        self, records: Mapping[NodeId, HealthRecord], removed: Collection[NodeId] = ()
    ) -> None:
        """Keep these records of nodes' health in place of those before, all or nothing.

        Args:
            records: By node.
            removed: Nodes whose records are not kept any more.
        """
        self._store_records(HEALTH, records, removed)

    def health(self) -> dict[NodeId, HealthRecord]:
        """Records of nodes' health. One that another version wrote is left out."""
        return self._records(HEALTH, HealthRecord)

    def store_speeds(
        self, records: Mapping[NodeId, SpeedRecord], removed: Collection[NodeId] = ()
    ) -> None:
        """Keep these records of nodes' speeds in place of those before, all or nothing.

        Args:
            records: By node.
            removed: Nodes whose records are not kept any more.
        """
        self._store_records(SPEEDS, records, removed)

    def speeds(self) -> dict[NodeId, SpeedRecord]:
        """Records of nodes' speeds. One that another version wrote is left out."""
        return self._records(SPEEDS, SpeedRecord)

    def _store_records(
        self,
        table: Table,
        records: Mapping[NodeId, HealthRecord] | Mapping[NodeId, SpeedRecord],
        removed: Collection[NodeId],
    ) -> None:
        if not records and not removed:
            return
        rows = [
            {"node": node, "record_json": msgspec.json.encode(record)}
            for node, record in records.items()
        ]
        with self._database.writer() as connection:
            stale = [{"of_node": node} for node in (*records, *removed)]
            connection.execute(delete(table).where(table.c.node == bindparam("of_node")), stale)
            if rows:
                connection.execute(insert(table), rows)

    def _records(self, table: Table, kind: type[_Record]) -> dict[NodeId, _Record]:
        """Records of a table, but for those that another version wrote."""
        records = {}
        for row in self._rows(select(table)):
            with suppress(msgspec.MsgspecError):
                records[NodeId(row["node"])] = msgspec.json.decode(row["record_json"], type=kind)
        return records

    def nodes(self) -> tuple[NodeRecord, ...]:
        """Every node, by first contact."""
        rows = self._rows(select(NODES).order_by(NODES.c.first_seen_ms, NODES.c.node))
        return tuple(NodeRecord(**row) for row in rows)

    def add_token(self, record: TokenRecord) -> None:
        """Keep a new token."""
        values = msgspec.structs.asdict(record) | {"role": record.role.value}
        self._change(insert(TOKENS).values(values))

    def token(self, token_id: TokenId) -> TokenRecord | None:
        """One token."""
        return next(
            map(_token, self._rows(select(TOKENS).where(TOKENS.c.token_id == token_id))), None
        )

    def tokens(self) -> tuple[TokenRecord, ...]:
        """Every token, by creation."""
        rows = self._rows(select(TOKENS).order_by(TOKENS.c.created_s, TOKENS.c.token_id))
        return tuple(_token(row) for row in rows)

    def revoke_token(self, token_id: TokenId) -> bool:
        """Void a token for good, with every node that took a use of it; False: it is unknown."""
        took_it = NODES.c.node.in_(select(JOINS.c.node).where(JOINS.c.token_id == token_id))
        changes = update(TOKENS).where(TOKENS.c.token_id == token_id), update(NODES).where(took_it)
        with self._database.writer() as connection:
            row_counts = [
                connection.execute(each.values(is_revoked=True)).rowcount for each in changes
            ]
        return row_counts[0] == 1

    def spend_token(self, token_id: TokenId, node: NodeId, now_s: int) -> bool:
        """Take one use for ``node``, atomically.

        A node that joined with the token before takes none, and passes unless the token is revoked.
        False when the token is unknown, revoked, expired or used up.
        """
        is_token = TOKENS.c.token_id == token_id
        with self._database.writer() as connection:
            token = connection.execute(select(TOKENS).where(is_token)).one_or_none()
            if token is None or token.is_revoked:
                return False
            if not connection.scalar(_join_query(token_id, node)):
                if 0 < token.expires_s <= now_s or token.uses_left == 0:
                    return False
                statement = update(TOKENS).where(is_token).values(uses_left=TOKENS.c.uses_left - 1)
                connection.execute(statement)
                connection.execute(insert(JOINS), {"token_id": token_id, "node": node})
            return True

    def joined_tokens(self, node: NodeId) -> frozenset[TokenId]:
        """Tokens that the node took a use of."""
        query = select(JOINS.c.token_id).where(JOINS.c.node == node)
        return frozenset(TokenId(row["token_id"]) for row in self._rows(query))

    def joined_nodes(self, token_id: TokenId) -> frozenset[NodeId]:
        """Nodes that took a use of the token."""
        query = select(JOINS.c.node).where(JOINS.c.token_id == token_id)
        return frozenset(NodeId(row["node"]) for row in self._rows(query))

    def add_spec_key(self, record: SpecKeyRecord) -> None:
        """Keep a new key of a user."""
        self._change(insert(SPEC_KEYS).values(msgspec.structs.asdict(record)))

    def spec_keys(self) -> tuple[SpecKeyRecord, ...]:
        """Keys of all users, by registration."""
        order = SPEC_KEYS.c.registered_ms, SPEC_KEYS.c.public_key
        return tuple(SpecKeyRecord(**row) for row in self._rows(select(SPEC_KEYS).order_by(*order)))

    def change_spec_key(self, public_key: bytes, state: str) -> bool:
        """Change the state of a user's key; False: it is unknown."""
        of_key = SPEC_KEYS.c.public_key == public_key
        return self._change(update(SPEC_KEYS).where(of_key).values(state=state))

    def _change(self, change: Executable) -> bool:
        with self._database.writer() as connection:
            return connection.execute(change).rowcount == 1

    def _rows(self, query: Executable) -> list[dict[str, Any]]:
        with self._database.reader() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]


def _join_query(token_id: TokenId, node: NodeId) -> Select[tuple[str]]:
    return select(JOINS.c.node).where(JOINS.c.token_id == token_id, JOINS.c.node == node)


def _token(row: dict[str, Any]) -> TokenRecord:
    return TokenRecord(**(row | {"role": Role(row["role"])}))
