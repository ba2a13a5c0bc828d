"""World files: TOML into a `WorldDescription`, and its links over time as pure functions."""

from netsim.network.worldfile.course import LinkState, WorldCourse, link_state
from netsim.network.worldfile.description import (
    COORDINATOR,
    Fault,
    FaultKind,
    NodeDescription,
    WorldDescription,
)
from netsim.network.worldfile.reading import parse_world, read_world_file

__all__ = [
    "COORDINATOR",
    "Fault",
    "FaultKind",
    "LinkState",
    "NodeDescription",
    "WorldCourse",
    "WorldDescription",
    "link_state",
    "parse_world",
    "read_world_file",
]
