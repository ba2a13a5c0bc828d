"""What a transfer of bulk sends, and how it fails; this module loads no HTTP library."""

from pathlib import Path
from typing import NamedTuple

from hypergpu.part_file import Span


class BulkBrokenError(Exception):
    """Bytes broke off; another attempt may go on where they did."""


class BulkRefusedError(BulkBrokenError):
    """The store refused them; a fresh ticket may help."""


class BulkAbsentError(BulkRefusedError):
    """The store has no such blob, or another one: its copy is no good."""


class FileRange(NamedTuple):
    """Bytes of a file to send."""

    path: Path
    span: Span
