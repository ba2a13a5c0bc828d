"""What the journal says of a shard that a node's control stream hands back."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.core.training.job.events import ShardHandedBack
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.service.calls import Caller, Requests
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.node_session import ControlSessions
from coordinator.shell.store.journal.records import NodeRecord
from hypergpu.assignment import FailureCause
from hypergpu.protocol import PROTOCOL
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import hand_back_message
from tests.calls_in_process import Conversation
from tests.unit.shell.whole_shell import JOB, NODE, WholeShell, begin_job, driving, services_in

HELLO = node_pb2.Hello(version=node_pb2.Version(protocol=PROTOCOL, software="test"))


async def journalled_hand_back(services: WholeShell, message: node_pb2.HandBack) -> ShardHandedBack:
    """The event of a message that NODE sends."""
    nodes = KnownNodes(services.journal)
    nodes.admit(NodeRecord(NODE, b"", b"{}", "test", 0, 0))
    sessions = ControlSessions(
        NodeGate(nodes, is_plaintext=True),
        services.greeter,
        services.driver,
        services.fleet,
        services.performing,
        payments=None,
    )
    context: Any = Conversation(NODE)
    requests = Requests(context, node_pb2.ControlRequest.FromString)
    answers: Any = sessions.control(Caller(context, "NodeService.Control"), requests)
    context.say(hello=HELLO)
    context.say(hand_back=message)
    context.say(heartbeat=node_pb2.Heartbeat(sequence=1))
    while (await anext(answers)).WhichOneof("message") != "heartbeat_echo":
        pass
    await answers.aclose()
    entries = services.journal.read(JOB).entries
    body = next(entry.body_json for entry in entries if entry.kind == "ShardHandedBack")
    return msgspec.json.decode(body, type=ShardHandedBack)


def shard_lease(services: WholeShell) -> node_pb2.Lease:
    """The lease that NODE's shard is under."""
    round_ = services.jobs[JOB].job.round
    assert round_ is not None
    number = round_.participants[NODE].lease
    return node_pb2.Lease(job_id=JOB, round=0, number=number)


@pytest.mark.parametrize("cause", FailureCause)
async def test_the_cause_says_whether_memory_lacks_and_the_text_does_not(
    tmp_path: Path, cause: FailureCause
) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await begin_job(services)
        for_people = "it took 9 bytes" if cause is FailureCause.OUT_OF_MEMORY else "out of memory"
        message = hand_back_message(shard_lease(services), for_people, cause)
        event = await journalled_hand_back(services, message)
    assert event.reason == for_people
    assert event.lacks_memory is (cause is FailureCause.OUT_OF_MEMORY)


@pytest.mark.parametrize("reason", ["out of memory: 2 GiB", "OWNER_DISK (7103): 9 bytes"])
async def test_an_older_node_says_by_its_text_that_memory_lacks(
    tmp_path: Path, reason: str
) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await begin_job(services)
        message = node_pb2.HandBack(lease=shard_lease(services), reason=reason)
        event = await journalled_hand_back(services, message)
    assert event.reason == reason
    assert event.lacks_memory is (reason == "out of memory: 2 GiB")
