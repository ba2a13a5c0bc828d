"""Links held open by the command, and what must be gone after it."""

import os
import sys
from pathlib import Path

import psutil

from netsim.emulation import namespaces
from tests.conformance.netsim.backends import can_tunnel

OPENABLE = ("proxy", *(["tunnel"] if can_tunnel() else []))
NETSIM = [sys.executable, "-P", "-m", "netsim"]
OURS = f"shaped{os.getpid()}"
"""A node's name, and so part of a namespace's, that no other run has."""
END_WITHIN_S = 240
FAR_RTT_MS = 120
_NODE = '[[nodes]]\nname = "{}"\nrtt_ms = {}\nup_mbit_s = 20\ndown_mbit_s = 20\n'


def world_file(folder: Path, more: str = "") -> str:
    """A world of two nodes: ours, and one far away."""
    path = folder / "held.toml"
    path.write_text(more + _NODE.format(OURS, 2) + _NODE.format("far", FAR_RTT_MS), "utf-8")
    return str(path)


def namespaces_left() -> list[str]:
    """Network namespaces with our node's name."""
    return [each.name for each in namespaces.FOLDER.glob(f"*-{OURS}")]


def descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what those have."""
    return psutil.Process(pid).children(recursive=True)


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for the end of processes; those that do not end are returned."""
    _, alive = psutil.wait_procs(processes, timeout=END_WITHIN_S)
    return alive
