"""Farm jobs as the table of kinds has them."""

from coordinator.core.farm.kind import FARM
from coordinator.shell.driver.kinds import ShellKind
from coordinator.shell.kinds.farm.demand import farm_demand, unmet_reason, uses_nodes
from coordinator.shell.kinds.farm.perform import FarmPerformer
from coordinator.shell.kinds.farm.runtime import FarmRuntime

FARM_ENTRY = ShellKind(
    FARM,
    runtime=FarmRuntime,
    performer=FarmPerformer,
    demand=farm_demand,
    uses_nodes=uses_nodes,
    unmet_reason=unmet_reason,
)
