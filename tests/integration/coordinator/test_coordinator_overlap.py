"""Rounds that overlap, with real processes that are killed while they do."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    JobSpec,
    Outer,
    RoundRule,
    TrainingSettings,
)
from tests.processes import Cluster, Happening, accepted_updates

ROUNDS = 8
SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=12, nodes=2),
    codec=CodecChoice(up="int8"),
    round=RoundRule(overlap="eager"),
    outer=Outer(momentum=0.5),
    evaluation=Evaluation(every=100),
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
    accepted = [(round_, node) for round_, node, _ in accepted_updates([*cluster.events(job_id)])]
    assert job.phase == "finished"
    assert len(accepted) == len(set(accepted)) == 2 * ROUNDS
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
    waiting = replace(SPEC, round=RoundRule())
    assert end(cluster, cluster.submit(waiting)) != digest_without_kills


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
