"""Entries by name, built-in ones and those of other packages, and building what they name."""

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from hypergpu.workloads.entries import BUILT_IN
from hypergpu.workloads.entry import Options, WorkloadEntry, complete_options

GROUP = "hypergpu.workloads"


class UnknownWorkloadError(LookupError):
    """No entry has the name. The text lists those there are."""


class BuilderMissingError(RuntimeError):
    """The builder cannot be imported. ``module`` is what is missing, such as ``torch``."""

    def __init__(self, entry: WorkloadEntry, module: str) -> None:
        super().__init__(
            f"workload {entry.name} needs the Python module {module}, which is not installed"
        )
        self.module = module


@cache
def _entries_of_packages() -> tuple[tuple[WorkloadEntry, ...], tuple[str, ...]]:
    """Entries of other packages, and why any of them are left out."""
    found: list[WorkloadEntry] = []
    complaints: list[str] = []
    taken = {entry.name for entry in BUILT_IN}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
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
        elif entry.name in taken:
            complaints.append(f"{where} is left out: the name is taken")
        else:
            taken.add(entry.name)
            found.append(entry)
    return tuple(found), tuple(complaints)


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
    module, _, name = entry.builder.partition(":")
    try:
        builder = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        raise BuilderMissingError(entry, missing.name or module) from missing
    return builder(complete)
