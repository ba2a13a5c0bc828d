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


class PrivateTable:
    """One connection to a file that only its user may read.

    What is written is not forced to the disk: the loss of a process loses none of it, that of the
    machine's power the newest. Readers do not wait for writers.

    Args:
        path: The file, which is made where it is missing.
        fix: What helps where it is damaged.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be made.
    """

    def __init__(self, path: Path, fix: str) -> None:
        self._path = path
        self._fix = fix
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
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=self._fix) from error

    def _ensure_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_LOCKED_S, check_same_thread=False)
        weakref.finalize(self, connection.close)
        # A file system without shared memory keeps the usual journal.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        return connection
