"""Journals of tests: the product's own, in a folder of the test, closed after it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import Entry, RequestClaim, UpdateCount
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId

_open: list[Journal] = []


class FolderJournal(Journal):
    """A journal in a folder, whose disk is full while ``is_full``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "journal.sqlite"))
        _open.append(self)
        self.is_full = False

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        self._check_space()
        super().append(entries, claims)

    def record_activity(
        self, last_seen_ms: Mapping[NodeId, int], updates: Mapping[NodeId, UpdateCount]
    ) -> None:
        self._check_space()
        super().record_activity(last_seen_ms, updates)

    def _check_space(self) -> None:
        if self.is_full:
            raise HyperGPUError(Reason.DISK_FULL, "no space")


def close_journals() -> None:
    """Close every journal that the test opened."""
    while _open:
        _open.pop().close()
