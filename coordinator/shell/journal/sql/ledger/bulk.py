"""Many new rows in few statements."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from sqlalchemy import Table, insert
from sqlalchemy.engine import Connection

_VARIABLES_MOST = 999
"""In one statement; every SQLite takes so many."""
Row = tuple[object, ...]


def insert_rows(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows that hold a value for every column, in the table's order.

    SQLite lets go of the interpreter's lock for each statement and takes it again after it. With a
    statement a row, threads that sign or verify meanwhile get it in between, each time.
    """
    if connection.dialect.name != "sqlite":
        names = [column.name for column in table.columns]
        if rows:
            values = [dict(zip(names, row, strict=True)) for row in rows]
            connection.execute(insert(table), values)
        return
    most = _VARIABLES_MOST // len(table.columns)
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        connection.exec_driver_sql(_statement(table, len(part)), tuple(_flat(part)))


@lru_cache
def _statement(table: Table, rows: int) -> str:
    """The same object for the same count: the driver then finds what it has compiled."""
    names = ", ".join(column.name for column in table.columns)
    row = f"({', '.join('?' * len(table.columns))})"
    return f"INSERT INTO {table.name} ({names}) VALUES {', '.join([row] * rows)}"  # noqa: S608 ours


def _flat(rows: Iterable[Row]) -> Iterable[object]:
    return (value for row in rows for value in row)
