"""Assignments with what is beside them, as they wait in the nodes' streams."""

from pathlib import Path

from msgspec.structs import replace

from coordinator.core.network.inline import QUEUED_BYTES_MAX
from coordinator.shell.kinds.training.model_delivery import ModelDelivery
from coordinator.shell.nodes.control_stream import ControlStream, QueuedMessage
from hypergpu.assignment import Assignment
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId
from hypergpu.units import Bytes
from tests.unit.node.node_states import assignment
from tests.unit.shell.whole_shell import (
    JOB,
    WholeShell,
    connect_node,
    driving,
    prepared_job,
    services_in,
)

CONTENT = bytes(8_192)


def work_on(blob: BlobRef) -> Assignment:
    work: Assignment = assignment()
    return replace(work, task=replace(work.task, model=blob), deltas=(), initial=None)


def connect(services: WholeShell, number: int) -> ControlStream:
    stream = connect_node(services, NodeId(f"0x{number:040x}"))
    stream.takes_blobs = True
    return stream


def next_message(stream: ControlStream) -> QueuedMessage:
    message = stream.outbox.get_nowait()
    assert message is not None
    return message


async def test_a_thousand_assignments_share_the_bytes_of_their_model(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        work = work_on(services.blobs.put(CONTENT))
        streams = [connect(services, number) for number in range(1_000)]
        for stream in streams:
            services.training.delivery.send(runtime, stream, work)
    contents = [next_message(stream).content for stream in streams]
    assert contents[0] == CONTENT
    assert all(content is contents[0] for content in contents)
    assert runtime.bytes_down == 1_000 * len(CONTENT)


async def test_what_waits_in_all_streams_is_bounded_and_freed(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        work = work_on(services.blobs.put(CONTENT))
        count = QUEUED_BYTES_MAX // len(CONTENT) + 1
        streams = [connect(services, number) for number in range(count)]
        for stream in streams:
            services.training.delivery.send(runtime, stream, work)
        queued_messages = [next_message(stream) for stream in streams]
        room = streams[0].room
        assert room.used_bytes == QUEUED_BYTES_MAX
        last = queued_messages[-1]
        assert not last.content
        assert last.message.assignment.HasField("model_ticket")
        streams[0].note_written(queued_messages[0])
        for stream in streams[1:]:
            services.nodes.disconnect(stream)
        assert room.used_bytes == 0


async def test_a_stream_with_a_blob_that_was_not_taken_in_gets_no_second_one(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        work, stream = work_on(services.blobs.put(CONTENT)), connect(services, 1)
        for _ in range(2):
            services.training.delivery.send(runtime, stream, work)
        assert next_message(stream).content
        assert not next_message(stream).content


async def test_a_blob_that_is_damaged_or_gone_is_left_to_its_ticket(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        blob = services.blobs.put(CONTENT)
        services.blobs.path(blob.digest).write_bytes(b"x" + CONTENT[1:])
        absent_blob = BlobRef(digest_of(b"absent"), Bytes(6))
        delivery = ModelDelivery(services.storage, services.fleet)
        for number, each_blob in enumerate((blob, absent_blob)):
            stream = connect(services, number)
            delivery.send(runtime, stream, work_on(each_blob))
            message = next_message(stream)
            assert not message.content
            assert message.message.assignment.HasField("model_ticket")
        assert services.jobs[JOB].bytes_down == 0
