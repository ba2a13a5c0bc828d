"""The kind `echo` as a coordinator's table has it."""

from coordinator.shell.driver.kinds import ShellKind
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.performers.packed_work import PackedWorkPerformer, packed_demand
from tests.kinds.echo.core.kind import ECHO
from tests.kinds.echo.core.state import KIND, VERSION, EchoPhase

ECHO_ENTRY = ShellKind(
    ECHO,
    runtime=WorkRuntime,
    performer=PackedWorkPerformer,
    demand=packed_demand(KIND, VERSION),
    uses_nodes=lambda job: job.phase is EchoPhase.WORKING,
)
