"""Versions of workloads as this machine has them installed."""

from hypergpu.workloads.entry import trains_version
from hypergpu.workloads.registry import UnknownWorkloadError, find


def catalogue_version(workload: str) -> int:
    """Version of a workload as this machine has it; 0: it has none."""
    try:
        return find(workload).version
    except UnknownWorkloadError:
        return 0


def later_versions(workload: str, version: int) -> frozenset[int]:
    """Versions of a workload after this one that train its jobs alike, as this machine knows."""
    try:
        entry = find(workload)
    except UnknownWorkloadError:
        return frozenset()
    if not trains_version(entry, version):
        return frozenset()
    return frozenset(range(version + 1, entry.version + 1))
