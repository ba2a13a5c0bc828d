"""Where the coordinators on one database are found: each tells it at its start."""

import time
from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from coordinator.shell.store.journal.database import Database
from coordinator.shell.store.journal.schema import COORDINATORS

_MOST = 8
"""Coordinators that are told of, those that started last."""


class CoordinatorRecord(msgspec.Struct, frozen=True):
    """A coordinator that may drive."""

    name: str
    address: str
    """``host:port`` of the main listener."""
    node_address: str
    """``host:port`` of the listener for nodes."""


def register(connection: Connection, record: CoordinatorRecord) -> None:
    """Tell others of a coordinator that has started."""
    connection.execute(delete(COORDINATORS).where(COORDINATORS.c.name == record.name))
    row = msgspec.structs.asdict(record) | {"started_ms": time.time_ns() // 1_000_000}
    connection.execute(insert(COORDINATORS), row)


class OtherCoordinators:
    """Those besides this one. Reading them asks nobody."""

    def __init__(self, database: Database | None = None, name: str = "") -> None:
        """None are known until `refresh`; without a database there are none."""
        self._database = database
        self._name = name
        self._known: Sequence[CoordinatorRecord] = ()

    def refresh(self) -> None:
        """Read who there is. Blocks."""
        if self._database is None:
            return
        table = COORDINATORS.c
        query = select(table.name, table.address, table.node_address)
        query = query.where(table.name != self._name).order_by(table.started_ms.desc())
        with self._database.reader() as connection:
            rows = connection.execute(query.limit(_MOST)).all()
        self._known = [CoordinatorRecord(*row) for row in rows]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where users, operators and joining nodes find them."""
        return tuple(each.address for each in self._known)

    @property
    def node_addresses(self) -> tuple[str, ...]:
        """Where nodes that have joined find them."""
        return tuple(each.node_address for each in self._known)
