"""Served models as the table of kinds has them."""

from coordinator.core.serving.kind import SERVING
from coordinator.shell.driver.kinds import ShellKind
from coordinator.shell.kinds.serving.demand import serve_demand, unmet_reason, uses_nodes
from coordinator.shell.kinds.serving.perform import ServePerformer
from coordinator.shell.kinds.serving.runtime import ServeRuntime

SERVING_ENTRY = ShellKind(
    SERVING,
    runtime=ServeRuntime,
    performer=ServePerformer,
    demand=serve_demand,
    uses_nodes=uses_nodes,
    unmet_reason=unmet_reason,
)
"""A model on nodes, which answer calls."""
