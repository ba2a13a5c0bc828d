"""A number beside a SQLite file: how many transactions it must hold.

SQLite ends its write-ahead log at the first frame that is damaged and drops what follows without
a word. The witness tells. It is written after each commit without waiting for the disk: it may be
behind the database after a power cut, which says nothing; ahead of it, rows are gone.
"""

import os
from pathlib import Path

from blake3 import blake3

from coordinator.shell.store.journal.file_lock import PRIVATE_FLAGS

_NUMBER_BYTES = 8
_CHECK_BYTES = 8


class Witness:
    """The file ``FILE.witness``."""

    def __init__(self, path: Path) -> None:
        witness_path = path.with_name(path.name + ".witness")
        self._descriptor = os.open(witness_path, PRIVATE_FLAGS, 0o600)

    def number(self) -> int:
        """The number last written; 0 when the file is new or torn."""
        content = os.pread(self._descriptor, _NUMBER_BYTES + _CHECK_BYTES, 0)
        number, check = content[:_NUMBER_BYTES], content[_NUMBER_BYTES:]
        return int.from_bytes(number, "big") if check == _check(number) else 0

    def write(self, number: int) -> None:
        """Replace the number. It only helps to detect damage, so a full disk does not stop it."""
        content = number.to_bytes(_NUMBER_BYTES, "big")
        try:
            os.pwrite(self._descriptor, content + _check(content), 0)
        except OSError:
            return

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _check(number: bytes) -> bytes:
    return blake3(number).digest(length=_CHECK_BYTES)


def companion_path(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
