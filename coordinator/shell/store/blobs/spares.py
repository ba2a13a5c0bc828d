"""Files of removed blobs, kept for a moment to be written over.

Each round writes as many bytes as the one before it left behind. Writing over pages that the system
has in memory was measured at 0.02 s for 100 MB, fresh ones at 0.05 s, and at 0.3 s where the host
of a virtual machine has to find them.
"""

import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

from coordinator.shell.store.blobs.writing import Space

SPARE_BYTES_MIN = 1 << 20
"""Smaller files are not worth it."""
_SPARES_MAX = 16
_IDLE_S = 30.0


class _Spare(NamedTuple):
    path: Path
    size_bytes: int
    since_s: float


class Spares:
    """Counted in the space, and deleted when it is short. Threads may share it."""

    def __init__(self, folder: Path, space: Space) -> None:
        """Start with none: what an earlier process kept goes."""
        self._folder = folder
        self._space = space
        self._lock = threading.Lock()
        self._spares: list[_Spare] = []
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        space.reclaim = self.clear

    def offer(self, path: Path) -> None:
        """Take over a file that nobody reads or needs, or delete it."""
        size_bytes = path.stat().st_size
        if size_bytes < SPARE_BYTES_MIN:
            path.unlink()
            return
        spare_path = self._folder / secrets.token_hex(8)
        path.rename(spare_path)
        with self._lock:
            self._space.count(size_bytes)
            self._spares.append(_Spare(spare_path, size_bytes, time.monotonic()))
            oldest = self._spares[:-_SPARES_MAX]
            self._delete(oldest)

    def take(self, path: Path, size_bytes: int) -> bool:
        """Give a spare of exactly this size the name ``path``, to be written over from its start.

        Returns:
            False when there is none.
        """
        with self._lock:
            for spare in reversed(self._spares):
                if spare.size_bytes == size_bytes:
                    self._spares.remove(spare)
                    self._space.give(size_bytes)
                    spare.path.rename(path)
                    return True
        return False

    def expire(self, idle_s: float = _IDLE_S) -> None:
        """Delete what nobody has asked for since long."""
        oldest_s = time.monotonic() - idle_s
        with self._lock:
            self._delete([spare for spare in self._spares if spare.since_s <= oldest_s])

    def clear(self) -> bool:
        """Delete all of them. Returns whether that made space."""
        with self._lock:
            had_any = bool(self._spares)
            self._delete(list(self._spares))
        return had_any

    def _delete(self, spares: list[_Spare]) -> None:
        for spare in spares:
            self._spares.remove(spare)
            self._space.give(spare.size_bytes)
            spare.path.unlink(missing_ok=True)
