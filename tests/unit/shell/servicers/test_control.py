from pathlib import Path

from coordinator.core.commands import AssignShard
from coordinator.core.events import NodeJoined, NodeLost
from coordinator.core.round.outstanding import outstanding
from coordinator.shell.servicers.node.control import pending_assignment
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, parts_in, prepared_job

OTHER = NodeId("0x" + "b2" * 20)
NOW = Milliseconds(0)


async def test_a_node_that_dials_in_again_gets_what_is_outstanding_for_it(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    async with driving(parts):
        room = await prepared_job(parts)
        assert pending_assignment(room.job, NODE) is None
        await parts.driver.submit(JOB, NodeJoined(at_ms=NOW, node=NODE))
        assert pending_assignment(room.job, NODE) in outstanding(room.job)
        assert isinstance(pending_assignment(room.job, NODE), AssignShard)
        assert pending_assignment(room.job, OTHER) is None
        await parts.driver.submit(JOB, NodeLost(at_ms=NOW, node=NODE, reason="cable"))
        assert pending_assignment(room.job, NODE) is None
