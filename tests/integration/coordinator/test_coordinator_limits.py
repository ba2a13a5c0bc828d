"""A coordinator whose disk, ports or bulk port are in short supply."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.part_file import Span
from hypergpu.process import raise_descriptor_limit
from hypergpu.user.client import AsyncCoordinator, ConnectionTarget
from hypergpu.v1 import node_pb2
from hypergpu.wire.credentials import parse_token
from hypergpu.wire.update_requests import UPDATE_PATH
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, reason_of
from tests.polling import first_true_of
from tests.processes import Cluster
from tests.warm_workers import UNFORKED

PARAMETERS = 1 << 20
UPDATE = np.full(PARAMETERS, 0.25, np.float32).tobytes()
QUOTA = "HYPERGPU_COORDINATOR_DISK_QUOTA_BYTES"
QUOTA_BYTES = 2 * len(UPDATE) - 1
IDLE_CONNECTIONS = 1_100
SOFT_LIMIT = 1_024
STALLED_REQUESTS = 2_000
STALLED_BYTES_MOST = 100 << 20
INFLATED_BYTES = 128 << 20
STREAMS_MOST = 256
WAITING = JobSpec(workload="null", training=TrainingSettings(nodes=7))
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=3, inner_steps=1, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
)


async def test_a_full_disk_is_told_of_the_job_and_the_node_and_waited_out(tmp_path: Path) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        job_id = cluster.submit(SPEC)
        cluster.wait_for(job_id, lambda happening: happening.kind == "ModelInitialised")
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        coordinator.kill()
        coordinator.environment[QUOTA] = str(QUOTA_BYTES)
        coordinator.start()
        await node.channel.channel_ready()
        assignment = await next_assignment(node.control([("null", 1)]))
        node.bulk_port = coordinator.bulk_port
        with pytest.raises(HyperGPUError) as failure:
            await node.submit(node.offer(assignment, UPDATE), UPDATE)
        assert failure.value.reason is Reason.DISK_FULL
        with coordinator.client() as client:
            assert "DISK_FULL (4002)" in client.job(job_id).job.reason
            (shown_node,) = client.nodes()
            assert "DISK_FULL (4002)" in shown_node.reason

        coordinator.kill()
        del coordinator.environment[QUOTA]
        coordinator.start()
        node.bulk_port = coordinator.bulk_port
        await node.submit(node.offer(assignment, UPDATE), UPDATE)
        with coordinator.client() as client:
            assert "DISK_FULL" not in client.job(job_id).job.reason
        await node.close()


@contextmanager
def soft_limit(count: int) -> Iterator[None]:
    """Let processes that are started meanwhile open few files unless they ask for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_connections_that_say_nothing_stop_no_training(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with soft_limit(SOFT_LIMIT):
            cluster = stack.enter_context(Cluster(tmp_path, *NOBODY_LOST))
        raise_descriptor_limit()
        coordinator = cluster.coordinator
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        stream = node.control([("null", 1)])
        cluster.submit(SPEC)
        assignment = await next_assignment(stream)
        addresses = [coordinator.address, coordinator.node_address]
        for address in (*addresses, f"127.0.0.1:{coordinator.bulk_port}"):
            host, _, port = address.rpartition(":")
            for _ in range(IDLE_CONNECTIONS):
                stack.enter_context(socket.create_connection((host, int(port))))
        await node.submit(node.offer(assignment, UPDATE), UPDATE)
        assert (await next_assignment(stream)).lease.round == 1
        await node.close()


async def test_stalled_uploads_are_closed_and_hold_up_nobody(tmp_path: Path) -> None:
    raise_descriptor_limit()
    cluster = Cluster(tmp_path, *NOBODY_LOST)
    cluster.coordinator.environment |= UNFORKED
    with cluster:
        coordinator = cluster.coordinator
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        stream = node.control([("null", 1)])
        cluster.submit(SPEC)
        assignment = await next_assignment(stream)
        headers = node.update_headers(node.offer(assignment, UPDATE), Span(0, len(UPDATE)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length_line = f"Content-Length: {len(UPDATE)}\r\n"
        head = f"PUT {UPDATE_PATH} HTTP/1.1\r\nHost: x\r\n{length_line}{lines}\r\n"
        processes = [psutil.Process(coordinator.child.pid)]
        processes += processes[0].children(recursive=True)
        before_bytes = sum(each.memory_info().rss for each in processes)
        stalled_connections = [
            await asyncio.open_connection("127.0.0.1", coordinator.bulk_port)
            for _ in range(STALLED_REQUESTS)
        ]
        for _, writer in stalled_connections:
            writer.write(head.encode())
        with suppress(ConnectionError):
            await stalled_connections[0][0].read()
        # The first is closed while the others, of the same second, are still held.
        held_bytes = sum(each.memory_info().rss for each in processes) - before_bytes
        assert held_bytes <= STALLED_BYTES_MOST
        async with asyncio.timeout(120):
            for reader, writer in stalled_connections:
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
        await node.submit(node.offer(assignment, UPDATE), UPDATE)
        await node.close()


async def test_a_message_that_inflates_is_refused_and_takes_no_memory(tmp_path: Path) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        before_bytes = peak_bytes(coordinator.child.pid)
        methods = {coordinator.address: "Join", coordinator.node_address: "OfferUpdate"}
        for address, method in methods.items():
            channel = grpc.aio.insecure_channel(address, compression=grpc.Compression.Gzip)
            async with channel:
                call: Any = channel.unary_unary(f"/hypergpu.v1.NodeService/{method}")
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await call(bytes(INFLATED_BYTES), metadata=node.metadata)
            assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert peak_bytes(coordinator.child.pid) - before_bytes <= 16 << 20
        await node.close()


def peak_bytes(process_id: int) -> int:
    """The most memory that a process held so far."""
    status = Path(f"/proc/{process_id}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


async def test_a_node_that_floods_its_stream_is_cut_off_and_others_go_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        nodes = [WireNode(coordinator.address, coordinator.node_address) for _ in range(2)]
        streams = []
        for node in nodes:
            await node.join(coordinator.node_token())
            streams.append(node.control([("null", 1)]))
            assert (await anext(streams[-1])).HasField("welcome")
        with coordinator.freeze():
            for number in range(3_000):
                heartbeat = node_pb2.Heartbeat(sequence=number)
                nodes[0].say(node_pb2.ControlRequest(heartbeat=heartbeat))
            await nodes[0].flush()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await count_messages(streams[0])
        assert reason_of(failure.value) == "RATE_LIMITED"
        nodes[1].say(node_pb2.ControlRequest(heartbeat=node_pb2.Heartbeat(sequence=1)))
        assert (await anext(streams[1])).heartbeat_echo.sequence == 1
        for node in nodes:
            await node.close()


async def count_messages(stream: AsyncIterator[node_pb2.ControlResponse]) -> int:
    """How many messages come before a stream ends."""
    return len([message async for message in stream])


async def test_a_token_holds_so_many_streams_at_a_time_and_no_more(tmp_path: Path) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        token = parse_token((coordinator.data_dir / "operator.token").read_text())
        target = ConnectionTarget(coordinator.address, token, 240.0)
        async with await AsyncCoordinator.open(target) as operator:
            job_id = await operator.submit(WAITING)
            watches = [operator.read_events(job_id) for _ in range(STREAMS_MOST)]
            for watch in watches:
                await anext(watch)
            with pytest.raises(HyperGPUError, match=f"has {STREAMS_MOST} streams open") as failure:
                await anext(operator.read_events(job_id))
            assert failure.value.reason is Reason.LIMIT_REACHED
        async with await AsyncCoordinator.open(target) as operator, asyncio.timeout(60):
            # The coordinator hears of their end a moment later than this program.
            await first_true_of(partial(has_room, operator, job_id))


async def has_room(operator: AsyncCoordinator, job_id: str) -> bool:
    """Whether one stream more is let in."""
    try:
        await anext(operator.read_events(job_id))
    except HyperGPUError as error:
        return error.reason is not Reason.LIMIT_REACHED
    return True


def is_open_to_others(path: Path) -> bool:
    """Whether another user may read the file; not when it is gone meanwhile."""
    try:
        return bool(path.lstat().st_mode & 0o077)
    except FileNotFoundError:
        return False


def child_starts(process_id: int) -> list[tuple[list[str], dict[str, str]]]:
    """Command lines and environments of all that a process started and that is there."""
    children = psutil.Process(process_id).children(recursive=True)
    return [(each.cmdline(), each.environ()) for each in children]


def test_children_of_a_coordinator_see_no_secret_and_others_no_file(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *NOBODY_LOST)
    secrets = {"HF_TOKEN": "s3cret", "AWS_SECRET_ACCESS_KEY": "s3cret", "PGPASSWORD": "s3cret"}
    cluster.coordinator.environment.update(secrets)
    before = os.umask(0)
    try:
        cluster.coordinator.start()
        job_id = cluster.submit(SPEC)
        cluster.wait_for(job_id, lambda happening: happening.kind == "ModelInitialised")
        # The evaluator that made the model ends once it has nothing to do.
        children = child_starts(cluster.coordinator.child.pid)
        (node,) = cluster.add_nodes(1, settings=secrets)
        cluster.wait_for(job_id, lambda happening: happening.kind == "NodeJoined")
        children += child_starts(node.child.pid)
        assert {
            "coordinator.shell.store.bulk",
            "coordinator.shell.evaluator",
            "gpu_node.shell.worker",
        } <= {word for words, _ in children for word in words}
        for _, environment in children:
            assert not environment.keys() & secrets.keys()
        data_dir = cluster.coordinator.data_dir
        files = [path for folder in (data_dir, node.state_dir) for path in folder.rglob("*")]
        assert len(files) > 20
        assert [path for path in files if is_open_to_others(path)] == []
    finally:
        os.umask(before)
        for daemon in cluster.nodes:
            daemon.end()
        cluster.coordinator.end()


def test_a_coordinator_refuses_a_folder_that_others_can_change(tmp_path: Path) -> None:
    coordinator = Cluster(tmp_path).coordinator
    coordinator.data_dir.mkdir()
    coordinator.data_dir.chmod(0o777)
    status = coordinator.launch().wait(timeout=240)
    coordinator.end()
    assert status == Reason.FOLDER_UNUSABLE.exit_code
    assert f"Fix: chmod go-w {coordinator.data_dir}" in coordinator.log.read_text()
