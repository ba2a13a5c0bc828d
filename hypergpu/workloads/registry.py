"""Builds workloads by name: built-in entries, and those of other packages."""

import importlib
import sys
from functools import cache
from typing import Any

from hypergpu.workloads.built_in import BUILT_IN
from hypergpu.workloads.entry import Options, WorkloadEntry, complete_options, missing_modules
from hypergpu.workloads.installed import workload_points
from hypergpu.workloads.workload import JobWorkload


class UnknownWorkloadError(LookupError):
    """No entry has the name. The text lists those there are."""


class BuilderMissingError(RuntimeError):
    """The builder cannot be imported. ``module`` is what is missing, such as ``torch``."""

    def __init__(self, entry: WorkloadEntry, module: str) -> None:
        fix = f". Fix: pip install '{entry.install}'" if entry.install else ""
        super().__init__(
            f"workload {entry.name} needs the Python module {module}, which is not installed{fix}"
        )
        self.module = module


@cache
def _entries_of_packages() -> tuple[tuple[WorkloadEntry, ...], tuple[str, ...]]:
    """Entries of other packages, and why any of them are left out."""
    entries: list[WorkloadEntry] = []
    complaints: list[str] = []
    taken_names = {entry.name for entry in BUILT_IN}
    for point in sorted(workload_points(), key=lambda point: (point.name, point.value)):
        where = f"entry point {point.name} = {point.value}"
        try:
            entry = point.load()
        except Exception as error:  # noqa: BLE001 - another package's import may fail in any way
            complaints.append(f"{where} cannot be imported: {error!r}")
            continue
        if not isinstance(entry, WorkloadEntry) or entry.name != point.name:
            complaints.append(
                f"{where} must be a hypergpu.workloads.entry.WorkloadEntry named {point.name}"
            )
        elif entry.name in taken_names:
            complaints.append(f"{where} is left out: the name is taken")
        else:
            taken_names.add(entry.name)
            entries.append(entry)
    return tuple(entries), tuple(complaints)


def read_entries_again() -> None:
    """Forget the entries of other packages, which may have changed on disk. Not for a process that
    builds workloads: their modules would be of two versions.
    """
    for point in workload_points():
        package = point.module.partition(".")[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
    importlib.invalidate_caches()
    _entries_of_packages.cache_clear()


def entries() -> tuple[WorkloadEntry, ...]:
    """Every entry there is, built-in ones first."""
    return BUILT_IN + _entries_of_packages()[0]


def complaints() -> tuple[str, ...]:
    """Return complaints about entry points of other packages, for `hypergpu env` and logs."""
    return _entries_of_packages()[1]


def find(name: str) -> WorkloadEntry:
    """The entry with the name.

    Raises:
        UnknownWorkloadError: There is none.
    """
    for entry in entries():
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in entries())
    raise UnknownWorkloadError(f"there is no workload {name!r}; there are: {names}")


def build(
    entry: WorkloadEntry, options: Options
) -> Any:  # Any: the entry's kind says which protocol
    """The workload, built by importing what the entry names.

    Raises:
        OptionError: The options do not fit the entry.
        BuilderMissingError: A Python module is not installed.
    """
    complete = complete_options(entry, options)
    for missing_name in missing_modules(entry):
        raise BuilderMissingError(entry, missing_name)
    module, _, name = entry.builder.partition(":")
    try:
        builder = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise BuilderMissingError(entry, error.name or module) from error
    return builder(complete)


def build_for_job(entry: WorkloadEntry, options: Options, data_dir: str) -> Any:
    """The workload of a job with this data folder; raises what `build` does, and `DatasetError`."""
    workload = build(entry, options)
    return workload.for_job(data_dir) if isinstance(workload, JobWorkload) else workload
