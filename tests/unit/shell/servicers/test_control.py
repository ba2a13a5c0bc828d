from pathlib import Path

from coordinator.core.job.commands import AssignShard
from coordinator.core.job.events import NodeJoined, NodeLost
from coordinator.core.round.outstanding import outstanding
from coordinator.shell.servicers.node.control import pending_assignment
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, prepared_job, services_in

OTHER = NodeId("0x" + "b2" * 20)
NOW = Milliseconds(0)


async def test_a_node_that_dials_in_again_gets_what_is_outstanding_for_it(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        assert pending_assignment(runtime.job, NODE) is None
        await services.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE))
        assert pending_assignment(runtime.job, NODE) in outstanding(runtime.job)
        assert isinstance(pending_assignment(runtime.job, NODE), AssignShard)
        assert pending_assignment(runtime.job, OTHER) is None
        await services.driver.submit(JOB, NodeLost(at_ms=NOW, node=NODE, reason="cable"))
        assert pending_assignment(runtime.job, NODE) is None
