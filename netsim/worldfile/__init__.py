"""World files: TOML into a `WorldDescription`, and its links over time as pure functions."""

from netsim.worldfile.course import LinkState, WorldCourse, link_state
from netsim.worldfile.description import (
    COORDINATOR,
    Fault,
    FaultKind,
    NodeDescription,
    WorldDescription,
)
from netsim.worldfile.reading import parse_world, read_world_file

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
