"""What an attempt at an upload asks of whoever keeps the uploads' files."""

from pathlib import Path
from typing import Protocol

from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes


class Attempt(Protocol):
    """An upload's file in the hands of one attempt."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def blob(self) -> BlobRef:
        """What was declared."""
        ...


class Keeper(Protocol):
    """Has the last word over every file: an older attempt cannot touch a newer one's."""

    def discard(self, attempt: Attempt) -> None:
        """Throw an attempt's file away, unless a newer attempt has taken it over."""
        ...

    def shrink(self, attempt: Attempt, stored_bytes: Bytes) -> None:
        """Reserve for an attempt that ended no more than what it stored."""
        ...

    def release(self, attempt: Attempt, keep_s: int) -> None:
        """Hand a checked file to the blobs."""
        ...
