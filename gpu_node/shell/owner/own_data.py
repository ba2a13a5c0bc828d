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
        folder = _real(text)
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
    folder = _real(folders[name])
    faults: dict[str, list[str]] = {}
    try:
        for path, fault in _faults(folder):
            faults.setdefault(fault, []).append(path)
    except OSError as error:
        faults["it cannot be read"] = [str(error)]
    for fault, paths in faults.items():
        log.warning("a data set cannot be used", name=name, fault=fault, such_as=paths[0])
        detail = f"data set {name}: {fault} ({several(len(paths), 'place')})"
        raise HyperGPUError(Reason.OWNER_DATA, detail)
    return folder


_OPEN = "other users can change it: chmod -R go-w there"
_FOREIGN = "other users own it: chown -R $(id -u) there"
_AROUND = "other users can change a folder around it: chmod go-w there, or move the data"
_LEADS_OUT = "links lead out of it: remove them"
_NO_FILE = "it holds what is neither file nor folder: remove it"


def _faults(folder: Path) -> Iterator[tuple[str, str]]:
    """Paths that must not be there as they are, with the reason."""
    for parent in folder.parents:
        around = parent.lstat()
        # In a sticky folder, such as /tmp, others cannot replace what is not theirs.
        is_open = around.st_mode & 0o022 and not around.st_mode & stat.S_ISVTX
        if is_open or _is_foreign(around):
            yield str(parent), _AROUND
    unvisited_paths = [str(folder)]
    while unvisited_paths:
        path = unvisited_paths.pop()
        file_stat = os.lstat(path)
        if fault := _fault(path, file_stat, folder):
            yield path, fault
        if stat.S_ISDIR(file_stat.st_mode):
            with os.scandir(path) as entries:
                unvisited_paths += [entry.path for entry in entries]


def _fault(path: str, found: os.stat_result, folder: Path) -> str:
    """Why a path must not be there as it is; empty: it may."""
    if stat.S_ISLNK(found.st_mode):
        real = _real(path)
        # One that leads in a circle ends at a link.
        return "" if real.is_relative_to(folder) and not real.is_symlink() else _LEADS_OUT
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return _NO_FILE
    if _is_foreign(found):
        return _FOREIGN
    return _OPEN if found.st_mode & 0o022 else ""


def _is_foreign(found: os.stat_result) -> bool:
    return found.st_uid not in (0, os.geteuid())


def _real(path: str) -> Path:
    """The path without links; unlike `Path.resolve`, one in a circle is no error."""
    return Path(os.path.realpath(path))
