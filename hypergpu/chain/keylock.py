"""One writer for each key: two would spend the same nonces on different transactions."""

import fcntl
import os
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address


class KeyLock:
    """An exclusive lock on an account, which falls with the process however it ends."""

    def __init__(self, folder: Path, chain_id: int, address: Address) -> None:
        """Take the lock.

        Raises:
            HyperGPUError: FOLDER_UNUSABLE, another process sends with this key.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{chain_id}-{address}.lock"
        descriptor = _locked(self._path)
        while not _is_at(self._path, descriptor):
            # Whoever held it took the file away between our opening and our locking it: the next
            # one to come would lock another.
            os.close(descriptor)
            descriptor = _locked(self._path)
        self._descriptor = descriptor
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back, and leave no file."""
        if _is_at(self._path, self._descriptor):
            self._path.unlink()
        os.close(self._descriptor)


def usual_locks() -> Path:
    """Where the processes of one user lock their keys."""
    return Path.home() / ".local" / "share" / "hypergpu" / "locks"


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        os.close(descriptor)
        chain_id, _, address = path.stem.partition("-")
        raise HyperGPUError(
            Reason.FOLDER_UNUSABLE,
            f"the key of {address} is used on chain {chain_id} by another "
            f"process ({holder or 'unknown'})",
            fix="stop that one, or use a key of its own here",
        ) from None
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
