"""The lock beside a SQLite file: one process has the journal."""

import fcntl
import os
from pathlib import Path

from coordinator.shell.store.journal.records import JournalLockedError

PRIVATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class FileLock:
    """An exclusive lock on ``FILE.lock``, which names the process that holds it."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            JournalLockedError: another process, or another journal of this one, holds it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_path = path.with_name(path.name + ".lock")
        self._descriptor = os.open(lock_path, PRIVATE_FLAGS, 0o600)
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
