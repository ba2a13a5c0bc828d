"""A SQLite file of the user's own that many threads and processes read and write."""

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason

_PRIVATE = 0o600
_LOCKED_S = 10.0
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})
"""Codes of a file that holds no such table: others do not speak against what it holds."""
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_LOCKED_FIX = "try again, or end the other process that has it open; the file itself is whole"
_ACCESS_FIX = "let this user write to the file and its folder, with room on the disk"
_PRIMARY_CODE = 0xFF
"""Bits of SQLite's result codes that say what failed; those above say where."""


class PrivateTable:
    """One connection to a file that only its user may read.

    What is written is not forced to the disk: the loss of a process loses none of it, that of the
    machine's power the newest. Readers do not wait for writers.

    Args:
        path: The file, which is made where it is missing.
        fix: What helps where it is damaged.
        patience_s: How long it waits for another process that holds the file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be made.
    """

    def __init__(self, path: Path, fix: str, *, patience_s: float = _LOCKED_S) -> None:
        self._path = path
        self._fix = fix
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, _PRIVATE))
            path.chmod(_PRIVATE)
        except OSError as error:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A transaction, which the block's end commits. Threads take turns.

        Raises:
            HyperGPUError: FILE_UNUSABLE, it is damaged or another process holds it.
        """
        with self._lock, self._told_errors(), self._ensure_connection() as table:
            yield table

    def forget_deleted(self) -> None:
        """Overwrite what was deleted in the file's log, too, as far as nobody reads it now.

        Raises:
            HyperGPUError: As `open`.
        """
        with self._lock, self._told_errors():
            self._ensure_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _told_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            detail = f"{self._path}: {error}"
            fix = self._fix_of(error)
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error

    def _fix_of(self, error: sqlite3.Error) -> str:
        # Errors of Python's own have no code: rows or statements that do not fit the table.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY_CODE
        if code in _DAMAGED:
            return self._fix
        return _LOCKED_FIX if code in _LOCKED else _ACCESS_FIX

    def _ensure_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._patience_s, check_same_thread=False)
        weakref.finalize(self, connection.close)
        # A file system without shared memory keeps the usual journal, and so does a file of the
        # version before that another process is writing: the next connection changes it.
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY_CODE not in _LOCKED:
                raise
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        return connection
