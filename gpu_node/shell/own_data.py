"""Folders of data that stay on this node: checked before a worker sees one.

What goes wrong is told to the coordinator without a word of what is in a folder; the log has that.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import several

log = structlog.get_logger()


def check_places(folders: Mapping[str, str], root: Path) -> None:
    """Check that each folder is there and apart from the node's own, in which its keys are.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, with the key and what is right.
    """
    own = root.resolve()
    for name, text in folders.items():
        folder = Path(text).resolve()
        if not folder.is_dir():
            detail = f"data.{name} is {text}, and there is no such folder"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
        if own.is_relative_to(folder) or folder.is_relative_to(own):
            detail = f"data.{name} is {text}, which holds the node's own folder or lies in it"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="move the data elsewhere")


def checked_folder(folders: Mapping[str, str], name: str) -> Path:
    """The folder of a data set, if it may be trained on. Blocks: each file is looked at once.

    Raises:
        HyperGPUError: OWNER_DATA, the owner names none, or others can change it, or something in
            it leads out of it.
    """
    if name not in folders:
        detail = f"its owner has named no folder for the data set {name}"
        raise HyperGPUError(Reason.OWNER_DATA, detail)
    folder = Path(folders[name]).resolve()
    faults: dict[str, list[str]] = {}
    try:
        for path, fault in _faults(folder):
            faults.setdefault(fault, []).append(path)
    except OSError as broken:
        faults["it cannot be read"] = [str(broken)]
    for fault, paths in faults.items():
        log.warning("a data set cannot be used", name=name, fault=fault, such_as=paths[0])
        detail = f"data set {name}: {fault} ({several(len(paths), 'place')})"
        raise HyperGPUError(Reason.OWNER_DATA, detail)
    return folder


_OPEN = "other users can change it: chmod -R go-w there"
_LEADS_OUT = "links lead out of it: remove them"
_NO_FILE = "it holds what is neither file nor folder: remove it"


def _faults(folder: Path) -> Iterator[tuple[str, str]]:
    """Paths that must not be there as they are, with the reason."""
    waiting = [str(folder)]
    while waiting:
        path = waiting.pop()
        mode = os.lstat(path).st_mode
        if fault := _fault(path, mode, folder):
            yield path, fault
        if stat.S_ISDIR(mode):
            with os.scandir(path) as entries:
                waiting += [entry.path for entry in entries]


def _fault(path: str, mode: int, folder: Path) -> str:
    """Why a path must not be there as it is; empty: it may."""
    if stat.S_ISLNK(mode):
        return "" if Path(path).resolve().is_relative_to(folder) else _LEADS_OUT
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return _NO_FILE
    return _OPEN if mode & 0o022 else ""
