"""Rounds that overlap or are planned, with real processes that are killed or start late."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    JobSpec,
    OuterSettings,
    RoundRule,
    TrainingSettings,
    Trust,
)
from hypergpu.v1 import node_pb2
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster, Happening, accepted_updates

ROUNDS = 8
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=12, nodes=2),
    codec=CodecChoice(up="int8"),
    round=RoundRule(overlap="eager", quorum=1.0),
    outer=OuterSettings(momentum=0.5),
    evaluation=Evaluation(every=100),
    trust=Trust(duplicates="none"),
)
SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "40"}
"""The other node's update is in long before: it takes steps ahead all that time."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("overlap")) as cluster:
        cluster.add_nodes(1)
        cluster.add_nodes(1, settings=SLOW)
        yield cluster


@pytest.fixture(scope="module")
def digest_without_kills(cluster: Cluster) -> str | None:
    return end(cluster, cluster.submit(SPEC))


def end(cluster: Cluster, job_id: str) -> str | None:
    """The digest of the job's last model, once no update was lost or came twice."""
    job = cluster.wait_until_finished(job_id)
    accepted_pairs = [
        (round_, node) for round_, node, _ in accepted_updates([*cluster.events(job_id)])
    ]
    assert job.phase == "finished"
    assert len(accepted_pairs) == len(set(accepted_pairs)) == 2 * ROUNDS
    return job.model


def alone_in_round(cluster: Cluster, job_id: str, number: int) -> None:
    """Wait until the fast node's update is in: now it begins the next round and waits."""

    def is_first(happening: Happening) -> bool:
        return happening.kind == "UpdateReceived" and happening.fields["round"] == number

    cluster.wait_for(job_id, is_first)


@pytest.mark.full
def test_rounds_that_overlap_come_to_another_model(
    cluster: Cluster, digest_without_kills: str | None
) -> None:
    waiting_spec = replace(SPEC, round=RoundRule())
    assert end(cluster, cluster.submit(waiting_spec)) != digest_without_kills


def test_the_node_that_waits_has_begun_the_next_round_when_it_opens(
    cluster: Cluster, digest_without_kills: str | None
) -> None:
    assert digest_without_kills
    log = cluster.nodes[0].log.read_text("utf-8")
    assert f"was begun {SPEC.training.inner_steps // 2} inner steps early" in log


def test_a_node_killed_while_it_takes_steps_ahead_takes_them_again(
    cluster: Cluster, digest_without_kills: str | None
) -> None:
    job_id = cluster.submit(SPEC)
    for number in (1, 3, 4):
        alone_in_round(cluster, job_id, number)
        cluster.nodes[0].kill()
        cluster.nodes[0].run()
    assert end(cluster, job_id) == digest_without_kills


def test_a_coordinator_killed_while_nodes_take_steps_ahead_changes_nothing(
    cluster: Cluster, digest_without_kills: str | None
) -> None:
    job_id = cluster.submit(SPEC)
    for number in (1, 3, 4):
        alone_in_round(cluster, job_id, number)
        cluster.coordinator.kill()
        cluster.coordinator.start()
    assert end(cluster, job_id) == digest_without_kills


def test_both_killed_while_rounds_overlap_change_nothing(
    cluster: Cluster, digest_without_kills: str | None
) -> None:
    job_id = cluster.submit(SPEC)
    for number in (2, 5):
        alone_in_round(cluster, job_id, number)
        cluster.coordinator.kill()
        cluster.nodes[0].kill()
        cluster.nodes[0].run()
        cluster.coordinator.start()
    assert end(cluster, job_id) == digest_without_kills


PLANNED_SPEC = with_strategy(
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
    job_id = desk.cluster.submit(PLANNED_SPEC)

    def is_fourth(fields: dict[str, Any]) -> bool:
        return fields.get("round") == 3 and "participants" in fields

    await desk.until(job_id, is_fourth)
    assert {plan["resting"].get(node.node_id) for plan in desk.plans} == {"its worker is starting"}
    assert {record["participants"] for record in desk.records} == {2}

    node.say(node_pb2.ControlRequest(worker_ready=node_pb2.WorkerReady()))
    await desk.until(job_id, lambda fields: node.node_id in fields.get("plan", {}).get("nodes", {}))


async def test_a_node_that_is_not_connected_rests(desk: PlannedJob) -> None:
    stream = desk.node.control([("digits-softmax", 1)])
    await anext(stream)
    job_id = desk.cluster.submit(PLANNED_SPEC)
    await desk.until(job_id, lambda fields: "plan" in fields)
    desk.node.hang_up()
    rests = await desk.until(
        job_id, lambda fields: desk.node.node_id in fields.get("plan", {}).get("resting", {})
    )
    assert rests["plan"]["resting"][desk.node.node_id] == "not connected"
