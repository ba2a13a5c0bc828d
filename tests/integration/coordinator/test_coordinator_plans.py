import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hypergpu.jobfile import with_strategy
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.v1 import node_pb2
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster, Happening

SPEC = with_strategy(
    JobSpec(
        workload="digits-softmax", training=TrainingSettings(rounds=100_000, inner_steps=5, nodes=3)
    ),
    "aware",
)


class PlannedJob:
    """Two nodes that work, and one that only says how its worker is."""

    def __init__(self, cluster: Cluster, node: WireNode) -> None:
        self.cluster = cluster
        self.node = node
        self.plans: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []

    async def until(self, job_id: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The fields of the first journalled event that fits; keeps plans and records."""

        def is_wanted(event: Happening) -> bool:
            if event.kind == "RoundPlanned":
                self.plans.append(event.fields["plan"])
            elif event.kind == "RoundRecorded":
                self.records.append(event.fields)
            return fits(event.fields)

        return (await asyncio.to_thread(self.cluster.wait_for, job_id, is_wanted)).fields


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[PlannedJob]:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        await asyncio.to_thread(cluster.add_nodes, 2)
        node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
        await node.join(cluster.coordinator.node_token())
        yield PlannedJob(cluster, node)
        await node.close()


async def test_a_node_whose_worker_is_starting_rests_and_no_round_waits_for_it(
    desk: PlannedJob,
) -> None:
    node = desk.node
    node.is_starting = True
    stream = node.control([("digits-softmax", 1)])
    await anext(stream)
    job_id = desk.cluster.submit(SPEC)

    def is_fourth(fields: dict[str, Any]) -> bool:
        return fields.get("round") == 3 and "participants" in fields

    await desk.until(job_id, is_fourth)
    assert {plan["resting"].get(node.node_id) for plan in desk.plans} == {
        "poor: its worker is starting"
    }
    assert {record["participants"] for record in desk.records} == {2}

    node.say(node_pb2.ControlRequest(worker_ready=node_pb2.WorkerReady()))
    await desk.until(job_id, lambda fields: node.node_id in fields.get("plan", {}).get("nodes", {}))


async def test_a_node_that_is_not_connected_rests(desk: PlannedJob) -> None:
    stream = desk.node.control([("digits-softmax", 1)])
    await anext(stream)
    job_id = desk.cluster.submit(SPEC)
    await desk.until(job_id, lambda fields: "plan" in fields)
    desk.node.hang_up()
    rests = await desk.until(
        job_id, lambda fields: desk.node.node_id in fields.get("plan", {}).get("resting", {})
    )
    assert rests["plan"]["resting"][desk.node.node_id] == "poor: not connected"
