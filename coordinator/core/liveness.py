"""Who has gone silent. Heartbeats are folded here; only the loss of a node enters the round
machine.
"""

from collections.abc import Mapping

from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def overdue(
    last_heard: Mapping[NodeId, Milliseconds], now_ms: Milliseconds, limit_ms: Milliseconds
) -> tuple[NodeId, ...]:
    """Nodes not heard of for more than ``limit_ms``, the longest silent first."""
    silent = [(heard, node) for node, heard in last_heard.items() if now_ms - heard > limit_ms]
    return tuple(node for _, node in sorted(silent))
