"""All that this coordinator knows of nodes, and who moves them between jobs."""

from typing import NamedTuple

from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.nodes.readings import Readings


class Fleet(NamedTuple):
    """The nodes of all jobs."""

    nodes: ConnectedNodes
    readings: Readings
    """Readings of every node's line and speed, made anew after a restart."""
    health: FleetHealth
    """Health of every node, which outlives restarts."""
    allocator: NodeAllocator
