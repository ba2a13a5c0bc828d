"""A folder in which programs of one run meet: locked by its owner, so that leftovers are known."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "netsim-links-"


@contextmanager
def meeting_folder() -> Iterator[Path]:
    """Make a folder and remove it behind the block, and those of runs that were killed before."""
    _remove_ownerless()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        descriptor = _locked(folder)
        if descriptor is not None:
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_ownerless() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        descriptor = _locked(folder)
        if descriptor is not None:
            # The kernel drops a lock when its owner is gone, however it went.
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """Lock a folder of ours; None when it has an owner, is somebody else's, or is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened, present = os.fstat(descriptor), folder.lstat()
        if opened.st_uid == os.geteuid() and opened.st_ino == present.st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
