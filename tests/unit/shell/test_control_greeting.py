"""What a control stream tells its node of other coordinators, and when."""

from pathlib import Path
from typing import Any

from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.service.calls import Caller, Requests
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.node_session import ControlSessions
from coordinator.shell.store.journal.coordinators import (
    CoordinatorRecord,
    OtherCoordinators,
    register,
)
from coordinator.shell.store.journal.records import NodeRecord
from hypergpu.crypto import IdentityKey
from hypergpu.protocol import PROTOCOL
from hypergpu.v1 import node_pb2
from tests.calls_in_process import Conversation
from tests.journals import FolderJournal
from tests.unit.shell.whole_shell import services_in

KEY = IdentityKey.generate()
STANDBY = CoordinatorRecord("standby", "192.0.2.7:7700", "192.0.2.7:7701")


async def test_a_node_is_told_within_a_heartbeat_of_a_coordinator_that_stands_by_since(
    tmp_path: Path,
) -> None:
    journal = FolderJournal(tmp_path)
    others = OtherCoordinators(journal.database, "this one")
    services = services_in(tmp_path, journal).replace(others=others)
    nodes = KnownNodes(journal)
    nodes.admit(NodeRecord(KEY.node_id, KEY.public_key, b"{}", "test", 0, 0))
    context: Any = Conversation(KEY.node_id)
    requests = Requests(context, node_pb2.ControlRequest.FromString)
    gate = NodeGate(nodes, is_plaintext=True)
    sessions = ControlSessions(
        gate, services.greeter, services.driver, services.fleet, services.performing, payments=None
    )
    answers: Any = sessions.control(Caller(context, "NodeService.Control"), requests)
    context.say(hello=node_pb2.Hello(version=node_pb2.Version(protocol=PROTOCOL, software="test")))
    assert list((await anext(answers)).welcome.coordinators) == []

    with journal.database.writer() as connection:
        register(connection, STANDBY)
    others.refresh()
    for sequence in (1, 2):
        context.say(heartbeat=node_pb2.Heartbeat(sequence=sequence))
    messages = [await anext(answers) for _ in range(3)]
    assert list(messages[0].welcome.coordinators) == [STANDBY.node_address]
    assert [each.heartbeat_echo.sequence for each in messages[1:]] == [1, 2]
    await answers.aclose()
