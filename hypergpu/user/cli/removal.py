"""`hypergpu uninstall`: what lies where on this machine, and its removal.

Keys that may be owed money are kept: nothing brings them back.
"""

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import place_beside
from hypergpu.node_report import DEVICE_FOLDERS
from hypergpu.user.client.settings import (
    ResolvedSetting,
    cache_folder,
    comparisons_folder,
    config_folder,
)

COORDINATORS_KEY = Path("identity/coordinator.key")
NODES_KEY = Path("identity.key")
RECEIPTS = Path("ledger")


class Place(NamedTuple):
    """A file or folder of ours."""

    path: Path
    meaning: str
    kept: tuple[Path, ...] = ()
    """What of it stays, as paths."""
    why: str = ""
    """Why it stays."""


def places(settings: Mapping[str, ResolvedSetting]) -> list[Place]:
    """All that is there."""
    node = Path(settings["state_dir"].value).expanduser()
    coordinator = Path(settings["data_dir"].value).expanduser()
    all_places = [
        *_with_key(node, "a node: certificate, work and downloads", _nodes_keys(node)),
        Place(node.with_name(f"{node.name}.worker"), "the Python made for a node's worker"),
        *_with_key(
            coordinator, "a coordinator: jobs, models and tokens", _coordinators_keys(coordinator)
        ),
        Place(config_folder(), "settings, and what `hypergpu up` left for commands"),
        Place(cache_folder(), "public data sets and fetched certificates"),
        Place(comparisons_folder(), "results of `hypergpu compare`"),
    ]
    return [each._replace(path=each.path.resolve()) for each in all_places if each.path.exists()]


def _with_key(folder: Path, meaning: str, kept: tuple[tuple[Path, ...], str]) -> Iterator[Place]:
    paths, why = kept
    passphrase = place_beside(folder)
    yield Place(folder, meaning, paths, why)
    yield Place(passphrase, f"opens the key in {folder}", (passphrase,) if paths else (), why)


def _nodes_keys(folder: Path) -> tuple[tuple[Path, ...], str]:
    """Keys and receipts of a machine's nodes, also without receipts: stake is owed, too."""
    nodes = [folder, *folder.glob(DEVICE_FOLDERS)]
    names = [node / name for node in nodes for name in (NODES_KEY, RECEIPTS)]
    kept_paths = tuple(path for path in names if path.exists())
    return kept_paths, "what it earned or staked is paid to it alone: hypergpu ledger claim"


def _coordinators_keys(folder: Path) -> tuple[tuple[Path, ...], str]:
    key = folder / COORDINATORS_KEY
    return ((key,), "it may hold escrow and fees on a chain") if key.exists() else ((), "")


def require_idle(found: list[Place]) -> None:
    """Check that no daemon uses one of the places.

    Raises:
        HyperGPUError: STATE_LOCKED, one does.
    """
    for place in found:
        for lock in place.path.glob("*lock"):
            if lock.is_file() and _is_held(lock):
                fix = "stop it: hypergpu leave ends a node, Ctrl-C a coordinator"
                raise HyperGPUError(Reason.STATE_LOCKED, f"a daemon uses {place.path}", fix=fix)


def _is_held(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(each.lstat().st_size for each in files if not each.is_dir())


def remove_all(found: list[Place]) -> None:
    """Remove all places but for what is kept of any of them: one may lie in another.

    Raises:
        OSError: One cannot be removed.
    """
    stay = [path for place in found for path in place.kept]
    kept_paths = {path.resolve() for path in stay} | {
        path.parent.resolve() / path.name for path in stay
    }
    for place in found:
        if place.path.exists():
            _remove(place.path, kept_paths)


def _remove(path: Path, kept: set[Path]) -> None:
    if path in kept:
        return
    if any(each.is_relative_to(path) for each in kept):
        for entry in list(path.iterdir()):
            _remove(entry, kept)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
