"""Whose namespaces are whose: one locked record for each run.

The owner and its router hold a lock on the record. The kernel drops it when both are gone, however
they went, so a record that can be locked names leftovers. Process ids would come round again.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from netsim.error import NetsimError
from netsim.namespaces import namespaces

RECORDS = Path("/run/netsim")
SLOTS = 1000


class Record(msgspec.Struct, frozen=True):
    """What a run wrote down before it made anything."""

    owner_pid: int
    """For people; the lock decides."""
    namespaces: tuple[str, ...]


class Claim:
    """A slot of this machine that is ours: its number is part of every namespace's name."""

    def __init__(self, slot: int, path: Path, descriptor: int) -> None:
        self.slot = slot
        self.descriptor = descriptor
        self._path = path

    @staticmethod
    def inherited(descriptor: int) -> "Claim":
        """Take over what the parent locked, from the open file alone."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        return Claim(int(path.stem), path, descriptor)

    def write(self, names: Sequence[str]) -> None:
        """Write down what is about to be made."""
        text = msgspec.json.encode(Record(os.getpid(), tuple(names)))
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)

    def remove_everything(self) -> list[str]:
        """Kill what runs in the namespaces of the record, remove them and empty the record.

        Returns:
            The namespaces that were there.
        """
        written = os.pread(self.descriptor, 1 << 20, 0)
        if not written:
            return []
        gone = namespaces.destroy(msgspec.json.decode(written, type=Record).namespaces)
        os.ftruncate(self.descriptor, 0)
        return gone

    def release(self) -> None:
        """Give the slot back. Call after ``remove_everything``."""
        self._path.unlink(missing_ok=True)
        os.close(self.descriptor)


def claim() -> Claim:
    """Lock the first free slot and remove what an earlier run left under it."""
    try:
        RECORDS.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NetsimError(f"{RECORDS} cannot be made: {error}", "make /run writable") from error
    for slot in range(SLOTS):
        path = RECORDS / f"{slot}.json"
        descriptor = _locked(path)
        if descriptor is not None:
            claimed = Claim(slot, path, descriptor)
            claimed.remove_everything()
            return claimed
    raise NetsimError(f"all {SLOTS} slots in {RECORDS} are taken", "end other runs of netsim first")


def clean() -> list[str]:
    """Remove what runs left behind that were killed together with their router.

    Returns:
        The namespaces that were found and removed.
    """
    gone: list[str] = []
    for claimed in _ownerless():
        gone.extend(claimed.remove_everything())
        claimed.release()
    return gone


def _ownerless() -> Iterator[Claim]:
    for path in sorted(RECORDS.glob("*.json")):
        descriptor = _locked(path)
        if descriptor is not None:
            yield Claim(int(path.stem), path, descriptor)


def _locked(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have unlinked the file between our opening and locking it.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
