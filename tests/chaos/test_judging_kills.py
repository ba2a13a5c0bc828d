"""A coordinator that is killed once it has judged a round's updates and before it folds them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypergpu.jobfile.spec import Evaluation, JobSpec, RoundRule, TrainingSettings, Trust
from hypergpu.user.client.history import TrustHistory, trust_history
from tests.processes import Cluster, json_lines

HONEST, ROUNDS = 3, 3
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=20, nodes=HONEST + 1),
    evaluation=Evaluation(every=ROUNDS),
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
LIES = {"HYPERGPU_NODE_WORKER_MODULE": "gpu_node.shell.worker.dishonest_layer"}
FULL_BPS = 10_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(HONEST)
        cluster.add_nodes(1, settings=LIES)
        yield cluster


def judgements(cluster: Cluster, job_id: str) -> dict[int, list[str]]:
    """What each round was judged to, by as many coordinators as judged it."""
    texts: dict[int, list[str]] = {}
    for line in json_lines(cluster.coordinator.log):
        if line["event"] == "updates were judged" and line["job_id"] == job_id:
            texts.setdefault(line["round"], []).append(line["judgement"])
    return texts


def histories(cluster: Cluster, job_id: str) -> list[TrustHistory]:
    """What the rounds found of each node, the liar last."""
    with cluster.client() as client:
        events = list(client.read_events(job_id).until_newest())
        all_histories = [trust_history(events, each.id) for each in client.nodes()]
    return sorted(all_histories, key=lambda each: -sum(point.quality_bps for point in each.rounds))


def test_a_round_that_is_judged_again_after_kills_comes_to_the_same_weights(
    cluster: Cluster,
) -> None:
    cluster.coordinator.end()
    cluster.coordinator.start(failpoints="aggregate.judged:2")
    job_id = cluster.submit(SPEC)
    for failpoints in ("aggregate.judged", ""):
        assert cluster.coordinator.child.wait(timeout=240) == -signal.SIGKILL
        cluster.coordinator.end()
        cluster.coordinator.launch(failpoints=failpoints)
    cluster.coordinator.wait_until_serving()
    assert cluster.wait_until_finished(job_id).phase == "finished"

    by_round = judgements(cluster, job_id)
    assert [len(by_round[number]) for number in range(ROUNDS)] == [1, 3, 1]
    assert len(set(by_round[1])) == 1
    assert len({texts[0] for texts in by_round.values()}) == ROUNDS

    *honest, liar = histories(cluster, job_id)
    assert len(honest) == HONEST
    for each in (*honest, liar):
        assert [point.round for point in each.rounds] == list(range(ROUNDS))
    for point in liar.rounds:
        assert point.quality_bps < FULL_BPS // 10
        assert "samples of its own shard" in point.reason
    for point in (point for each in honest for point in each.rounds):
        assert point.quality_bps == FULL_BPS or point.reason
