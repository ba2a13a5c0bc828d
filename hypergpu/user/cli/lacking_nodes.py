"""Nodes that lack a job's workload, each with the command that mends it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypergpu.user.terminal.output import short_id

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator, NodeView

_AWAY = frozenset({"away", "draining", "lost", "revoked", "starting"})


def lacking_lines(coordinator: "Coordinator", job_id: str, workload: str) -> list[str]:
    """Lines of `job show` about nodes that lack a job's workload; none where nodes are not told."""
    from hypergpu.errors import HyperGPUError

    try:
        nodes = coordinator.nodes()
    except HyperGPUError:  # only operators may list nodes
        return []
    version = _wanted_version(coordinator, job_id)
    return [f"  lacking   {line}" for line in lacking_nodes(nodes, workload, version)]


def _wanted_version(coordinator: "Coordinator", job_id: str) -> int | None:
    """Version of the workload that a job trains, from the beginning of its journal."""
    from hypergpu.journal.events import ModelInitialisedEvent

    for event in coordinator.read_events(job_id).until_newest():
        if isinstance(event.content, ModelInitialisedEvent):
            return event.content.workload_version
    return None  # its first model is not made yet


def lacking_nodes(
    nodes: "Sequence[NodeView]", workload: str, version: int | None = None
) -> list[str]:
    """A line for each connected node without a workload, or with another version of it, and what
    installs it. Jobs without a workload, as those of rings, have none.
    """
    from hypergpu.workloads.entry import OLDER_JOB_FIX

    if not workload:
        return []
    lines = []
    for node in nodes:
        has, name = node.workloads.get(workload), node.name or short_id(node.id)
        if node.state in _AWAY or (has is not None and _is_served(workload, has, version)):
            continue
        if has is None:
            lines.append(
                f"{name} does not offer {workload}. Fix there: {_install_line(workload)}, and allow"
                " it where its owner limits workloads"
            )
        elif has > (version or 0) and has == _version_here(workload):
            lines.append(
                f"{name} has {workload} {has}, as is installed here, and the job began with"
                f" {version}. Fix: {OLDER_JOB_FIX}"
            )
        else:
            fix = "here" if has > (version or 0) else "there"
            lines.append(
                f"{name} has {workload} {has}, the job wants {version}."
                f" Fix {fix}: {_install_line(workload, '-U ')}"
            )
    return lines


def _is_served(workload: str, has: int, version: int | None) -> bool:
    """Whether a node with one version of a workload trains jobs of another."""
    from hypergpu.workloads.entry import trains_version
    from hypergpu.workloads.registry import UnknownWorkloadError, find

    if version is None or has == version:
        return True
    try:
        entry = find(workload)
    except UnknownWorkloadError:
        return False
    return has == entry.version and trains_version(entry, version)


def _version_here(workload: str) -> int:
    """Version of the workload that is installed on this machine; 0: it is not."""
    from hypergpu.workloads.registry import UnknownWorkloadError, find

    try:
        return find(workload).version
    except UnknownWorkloadError:
        return 0


def _install_line(workload: str, update: str = "") -> str:
    from hypergpu.workloads.installed import package_of
    from hypergpu.workloads.registry import UnknownWorkloadError, find

    try:
        entry = find(workload)
    except UnknownWorkloadError:
        return f"install the package that has {workload}"
    extra = "hypergpu[torch]" if entry.kind == "torch" else "hypergpu"
    return f"pip install {update}'{package_of(workload) or entry.install or extra}'"
