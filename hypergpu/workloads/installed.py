"""Packages that have workloads, as they lie on disk at the moment: by name, in their versions.

Nothing of them is imported, so that a process which runs for months can look often.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import NamedTuple

from hypergpu.workloads.built_in import BUILT_IN

GROUP = "hypergpu.workloads"


class InstalledPackage(NamedTuple):
    """A package, or a module that built-in workloads need."""

    version: str
    written_ns: int
    """When the installer wrote the list of its files; 0: it left none."""


Packages = dict[str, InstalledPackage]


def installed_packages() -> Packages:
    """All packages with workloads, and the modules there are that built-in ones need."""
    importlib.invalidate_caches()
    packages = {
        package.name: InstalledPackage(package.version, _written_ns(package))
        for _, package in _whole_packages()
    }
    needed_modules = {name for entry in BUILT_IN for name in entry.needs}
    there = (name for name in sorted(needed_modules) if importlib.util.find_spec(name) is not None)
    return packages | {f"module {name}": InstalledPackage("", 0) for name in there}


def package_of(workload: str) -> str:
    """Name of the package here that has a workload; empty: none, or HyperGPU itself."""
    return next((package.name for name, package in _whole_packages() if name == workload), "")


def workload_points() -> Iterator[EntryPoint]:
    """Entry points of workloads, each of the first package of its name on the path.

    One that is half removed, or whose entry points cannot be read, has none.
    """
    seen_names: set[str] = set()
    for package in distributions():
        try:
            name: str | None = package.metadata["Name"]
            points = package.entry_points.select(group=GROUP)
        except (OSError, ValueError):  # text of no encoding is a ValueError, too
            continue
        if name is not None and (plain := name.lower().replace("_", "-")) not in seen_names:
            seen_names.add(plain)
            yield from points


def _whole_packages() -> Iterator[tuple[str, Distribution]]:
    """Names of workloads with their packages."""
    for point in workload_points():
        if point.dist is not None:
            yield point.name, point.dist


def _written_ns(package: Distribution) -> int:
    record = Path(str(package.locate_file(""))) / f"{_stem(package)}.dist-info" / "RECORD"
    try:
        return record.stat().st_mtime_ns
    except OSError:
        return 0


def _stem(package: Distribution) -> str:
    return f"{package.name.replace('-', '_')}-{package.version}"


class PackageWatch:
    """Looks for changed packages."""

    def __init__(self) -> None:
        self._folders = _folder_times()
        self.packages = _packages_at(self._folders)
        """As they were found last."""

    def has_changed(self) -> bool:
        """Whether a look would find anything to read. A few calls of `stat`."""
        return _folder_times() != self._folders

    def look(self) -> str:
        """Take in what has changed since the last look; gives that in words, empty: nothing."""
        folders = _folder_times()
        if folders == self._folders:
            return ""
        before, self._folders, self.packages = self.packages, folders, _packages_at(folders)
        return ", ".join(_changes(before, self.packages))


FolderTimes = tuple[tuple[str, int], ...]


@lru_cache(maxsize=1)
def _packages_at(_: FolderTimes) -> Packages:
    """Packages once folders were changed: the watches of a process read the disk once for all."""
    return installed_packages()


def _folder_times() -> FolderTimes:
    """When each folder that packages are installed to was changed: installers rename inside it."""
    return tuple((name, _changed_ns(name or ".")) for name in sys.path)


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns  # noqa: PTH116  each node looks often, and paths cost more
    except OSError:
        return 0


def _changes(before: Packages, after: Packages) -> list[str]:
    texts = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and old != new:
            texts.append(f"{name} {old.version} is {new.version} now")
        elif old is None and new is not None:
            texts.append(f"{name} {new.version}".rstrip() + " was installed")
        elif old is not None and new is None:
            texts.append(f"{name} {old.version}".rstrip() + " was removed")
    return texts
