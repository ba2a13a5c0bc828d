"""Salvage of a damaged SQLite file: every row that can still be read goes into a new one."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import Table, func, insert, select
from sqlalchemy.engine import URL, Connection

from coordinator.shell.store.journal.engines import make_engine
from coordinator.shell.store.journal.records import JournalUnreadableError
from coordinator.shell.store.journal.schema import ENTRIES, JOBS, JOURNAL, METADATA, prepare_tables
from coordinator.shell.store.journal.witness import companion_path
from hypergpu.units import several

_HEADER_BYTES = 100
_SMALL_BYTES = 64 << 20
_COMPANIONS = ("", "-wal", "-shm")


def salvage_database(path: Path) -> tuple[str, ...]:
    """Check a journal's file, and replace it by what can be saved of it when its pages are damaged.

    Raises:
        JournalUnreadableError: nothing can be saved; the file was not touched.
    """
    if not path.exists() or path.stat().st_size == 0:
        return ()
    problem = _problem(path)
    if not problem:
        return ()
    fresh = companion_path(path, ".salvaged")
    _remove(fresh)
    readable = _lengthened_copy(path)
    rows = _copy_tables(readable, fresh)
    _remove(readable)
    if not rows:
        _remove(fresh)
        raise JournalUnreadableError(
            f"the journal {path} cannot be read at all ({problem}): "
            "restore a backup, or move it away to start anew"
        )
    aside = _free_name(path)
    for companion in _COMPANIONS:
        with suppress(FileNotFoundError):
            companion_path(path, companion).rename(companion_path(aside, companion))
    fresh.rename(path)
    finding = (
        f"the journal {path} was damaged ({problem}): {several(rows, 'row')} could be"
        f" saved, the damaged file is kept as {aside.name}"
    )
    return (finding,)


def _problem(path: Path) -> str:
    try:
        with closing(sqlite3.connect(path)) as connection:
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if answer == "ok" else str(answer).replace("\n", " ")


def _lengthened_copy(path: Path) -> Path:
    """A copy as long as its header says: SQLite does not read a file that was cut off."""
    copy = companion_path(path, ".salvaging")
    shutil.copyfile(path, copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(companion_path(path, "-wal"), companion_path(copy, "-wal"))
    with copy.open("r+b") as file:
        header = file.read(_HEADER_BYTES)
        page_bytes = int.from_bytes(header[16:18], "big")
        pages = int.from_bytes(header[28:32], "big")
        wanted_bytes = page_bytes * pages
        # A damaged header may name any size: more than the file holds twice over is not believed.
        if path.stat().st_size < wanted_bytes <= max(2 * path.stat().st_size, _SMALL_BYTES):
            file.truncate(wanted_bytes)
    return copy


def _copy_tables(damaged: Path, fresh: Path) -> int:
    """Copy every readable row. Returns how many there were."""
    engine = make_engine(URL.create("sqlite", database=str(fresh)))
    with engine.connect() as connection, closing(sqlite3.connect(damaged)) as source:
        prepare_tables(connection, str(fresh))
        with connection.begin():
            tables = [table for table in METADATA.sorted_tables if table is not JOURNAL]
            rows = sum(_copy_table(source, connection, table) for table in tables)
            _restore_heads(connection)
    # Its last connection closed, all is in the main file, so that one rename moves it.
    engine.dispose()
    return rows


def _copy_table(source: sqlite3.Connection, fresh: Connection, table: Table) -> int:
    """Copy from both ends towards the damage."""
    copied_rows = 0
    for direction in ("ASC", "DESC"):
        for row in _readable_rows(source, table, direction):
            values = dict(zip(table.columns.keys(), row, strict=True))
            copied_rows += fresh.execute(insert(table).prefix_with("OR IGNORE"), values).rowcount
    return copied_rows


def _readable_rows(
    source: sqlite3.Connection, table: Table, direction: str
) -> Iterator[tuple[object, ...]]:
    columns = ", ".join(table.columns.keys())
    with suppress(sqlite3.DatabaseError):
        # By row number, which needs no index that may be damaged too. The names are our tables'.
        yield from source.execute(f"SELECT {columns} FROM {table.name} ORDER BY rowid {direction}")  # noqa: S608


def _restore_heads(connection: Connection) -> None:
    """Give jobs whose head was lost the one that their last row has."""
    newest = func.max(ENTRIES.c.sequence)
    query = select(ENTRIES.c.job_id, newest.label("last_sequence"), ENTRIES.c.chain)
    # SQLite takes the other columns of a group from the row that has the maximum.
    query = query.where(ENTRIES.c.job_id.not_in(select(JOBS.c.job_id))).group_by(ENTRIES.c.job_id)
    for job_id, sequence, chain in connection.execute(query).all():
        head = {"job_id": job_id, "last_sequence": sequence, "last_chain": chain}
        connection.execute(insert(JOBS), head)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := companion_path(path, f".damaged-{number}")).exists():
        number += 1
    return aside


def _remove(path: Path) -> None:
    for companion in _COMPANIONS:
        companion_path(path, companion).unlink(missing_ok=True)
