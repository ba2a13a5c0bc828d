"""Blobs that no collection may remove although no journalled event names them yet."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable

from hypergpu.ids import Digest


class Pins:
    """Blobs whose event is not journalled yet. Any thread may call."""

    def __init__(self) -> None:
        self._counts: Counter[Digest] = Counter()
        self._lock = threading.Lock()
        self.collecting = asyncio.Lock()
        """Lock of a collection, which does not know of pins that come while it runs."""

    def add(self, digests: Iterable[Digest]) -> None:
        """Keep these."""
        with self._lock:
            self._counts.update(digests)

    def drop(self, digests: Iterable[Digest]) -> None:
        """Take back one `add`."""
        with self._lock:
            self._counts.subtract(digests)
            self._counts = +self._counts

    def all(self) -> frozenset[Digest]:
        """Everything that is kept."""
        with self._lock:
            return frozenset(self._counts)
