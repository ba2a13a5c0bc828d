"""One coordinator per journal. The lock falls with the process, however it ends."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from coordinator.shell.journal.records import JournalLockedError

# Keyed by schema: coordinators may share a database when each has a schema of its own.
_KEY = "hashtextextended('hypergpu journal ' || current_schema(), 0)"
_TRY_LOCK = text(f"SELECT pg_try_advisory_lock({_KEY})")
_UNLOCK = text(f"SELECT pg_advisory_unlock({_KEY})")


class FileLock:
    """An exclusive lock on ``FILE.lock``, which names the process that holds it."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            JournalLockedError: another process, or another journal of this one, holds it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_path = path.with_name(path.name + ".lock")
        self._descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise JournalLockedError(
                f"the journal {path} is in use by a coordinator (process {holder}): "
                "stop that one, or give this one a data directory of its own"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back. The file stays: removing it would let two hold it."""
        os.close(self._descriptor)


def lock_database(connection: Connection, where: str) -> None:
    """Take PostgreSQL's advisory lock for as long as this connection lives.

    All writes go through this very connection, so a coordinator that lost its lock cannot write.

    Raises:
        JournalLockedError: another coordinator holds it.
    """
    taken = connection.scalar(_TRY_LOCK)
    connection.commit()
    if not taken:
        raise JournalLockedError(
            f"the journal at {where} is in use by another coordinator: "
            "stop that one, or give this one a database or a schema of its own"
        )


def unlock_database(connection: Connection) -> None:
    """Give it back now: the server notices a closed connection when it comes to that."""
    # A lost connection has no lock any more, and must not be made again.
    if not connection.invalidated:
        with suppress(SQLAlchemyError):
            connection.scalar(_UNLOCK)
            connection.commit()
