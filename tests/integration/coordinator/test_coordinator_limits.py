"""A coordinator whose disk, ports or bulk port are in short supply."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from yarl import URL

from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.process import raise_descriptor_limit
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, put_range, reason_of
from tests.processes import Cluster

PARAMETERS = 1 << 20
UPDATE = np.full(PARAMETERS, 0.25, np.float32).tobytes()
QUOTA = "HYPERGPU_COORDINATOR_DISK_QUOTA_BYTES"
QUOTA_BYTES = 2 * len(UPDATE) - 1
IDLE_CONNECTIONS = 1_100
SOFT_LIMIT = 1_024
STALLED_REQUESTS = 2_000
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
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.submit(node.offer(assignment, UPDATE), UPDATE)
        assert reason_of(refused.value) == "DISK_FULL"
        with coordinator.client() as client:
            assert "DISK_FULL (4002)" in client.job(job_id).job.reason
            (shown,) = client.nodes()
            assert "DISK_FULL (4002)" in shown.reason

        coordinator.kill()
        del coordinator.environment[QUOTA]
        coordinator.start()
        await node.channel.channel_ready()
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
    with ExitStack() as opened:
        with soft_limit(SOFT_LIMIT):
            cluster = opened.enter_context(Cluster(tmp_path, *NOBODY_LOST))
        raise_descriptor_limit()
        coordinator = cluster.coordinator
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        stream = node.control([("null", 1)])
        cluster.submit(SPEC)
        assignment = await next_assignment(stream)
        answer = await node.send_offer(node.offer(assignment, UPDATE))
        addresses = [coordinator.address, coordinator.node_address]
        bulk_port = URL(answer.ticket.ranges[0].url).port
        for address in (*addresses, f"127.0.0.1:{bulk_port}"):
            host, _, port = address.rpartition(":")
            for _ in range(IDLE_CONNECTIONS):
                opened.enter_context(socket.create_connection((host, int(port))))
        await node.submit(node.offer(assignment, UPDATE), UPDATE)
        assert (await next_assignment(stream)).lease.round == 1
        await node.close()


async def test_stalled_uploads_are_closed_and_hold_up_nobody(tmp_path: Path) -> None:
    raise_descriptor_limit()
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        coordinator = cluster.coordinator
        node = WireNode(coordinator.address, coordinator.node_address)
        await node.join(coordinator.node_token())
        stream = node.control([("null", 1)])
        cluster.submit(SPEC)
        assignment = await next_assignment(stream)
        answer = await node.send_offer(node.offer(assignment, UPDATE))
        (ranged,) = answer.ticket.ranges
        url = URL(ranged.url)
        head = (
            f"PUT {url.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(UPDATE)}\r\n"
            f"Authorization: {ranged.headers['Authorization']}\r\n"
            f"Content-Range: bytes 0-{len(UPDATE) - 1}/*\r\n\r\n"
        )
        stalled = [
            await asyncio.open_connection("127.0.0.1", url.port) for _ in range(STALLED_REQUESTS)
        ]
        for _, writer in stalled:
            writer.write(head.encode())
        async with asyncio.timeout(120):
            for reader, writer in stalled:
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
        assert await put_range(ranged, 0, UPDATE) == (204, "")
        await node.commit(node.offer(assignment, UPDATE))
        await node.close()
