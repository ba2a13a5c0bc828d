"""A ring of real nodes in which one gives other numbers than its layers do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ours.serving.standby import stands_by
from hypergpu.journal.serving_events import (
    AnswerDoubtedEvent,
    StageCheckedEvent,
    WindowRefusedEvent,
)
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.user.client import Coordinator
from hypergpu.user.serving.ring_model import finetune_ring
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready
from tests.lying_stage import MODULE as LYING_STAGE
from tests.polling import first_true
from tests.processes import Cluster, NodeProcess
from tests.tiny_bases import save_base

STAGES = 3
ANSWERS_MOST = 80
CALL = ModelCall(
    text="number 7 comes before", sampling=Sampling(temperature=0.0), new_tokens_most=16
)
KINDS = ("training", "serve")


class CheckedCluster:
    """A served model in stages, and the nodes that hold it or stand by."""

    def __init__(self, folder: Path, cluster: Cluster, client: Coordinator) -> None:
        self.cluster, self.client = cluster, client
        self.base = save_base(folder, num_hidden_layers=6, max_position_embeddings=256)
        self.job = ""

    def add_node(self, **settings: str) -> NodeProcess:
        """One more node, of an owner of its own."""
        name = f"node-{len(self.cluster.nodes)}"
        environment = {**settings, "HYPERGPU_NODE_NAME": name}
        return self.cluster.add_nodes(1, "torch", kinds=KINDS, settings=environment)[0]

    def serve(self) -> None:
        """Serve the model by the nodes that are there."""
        order = ServeOrder(str(self.base), name="tiny", stages=STAGES)
        self.job = start_serving(self.client, order).job
        wait_until_ready(self.client, self.job)

    def train_and_serve(self) -> None:
        """Serve what the nodes that are there have made of the model by training an adapter."""
        rows = [{"text": f"number {n} comes before {n + 1}"} for n in range(12)]
        model = finetune_ring(
            self.base,
            data=rows,
            stages={"count": STAGES, "any_line": True},
            coordinator=self.client,
            name="tiny",
            rounds=1,
            inner_steps=4,
            batch_size=4,
            options={"rank": 4, "sequence_length": 32},
            settings={"inner.optimizer": "adamw", "inner.learning_rate": 0.2},
        )
        self.job = model.job
        wait_until_ready(self.client, self.job)

    def wait_for_standby(self) -> None:
        """Wait until a node holds a stage ready."""
        first_true(lambda: stands_by(self.client, self.job, self._log_of))

    def _log_of(self, node: str) -> Path:
        """The log of a node by its id."""
        names = {each.id: each.name for each in self.client.nodes()}
        return self.cluster.nodes[int(names[node].removeprefix("node-"))].log

    def doubts_until(self, text: str) -> list[AnswerDoubtedEvent]:
        """Have calls answered until the reason of a doubt has a text; gives all doubts."""
        for _ in range(ANSWERS_MOST):
            parts = self.client.answer("tiny", CALL)
            assert any(isinstance(part, AnswerToken) for part in parts)
            doubts = self.events(AnswerDoubtedEvent)
            if any(text in each.reason for each in doubts):
                return doubts
        raise AssertionError(f"no doubt of which {text}")

    def events(self, kind: type[Any]) -> list[Any]:
        """Events of a kind so far."""
        events = self.client.read_events(self.job).until_newest()
        return [each.content for each in events if isinstance(each.content, kind)]


@pytest.fixture
def served_stages(tmp_path: Path) -> Iterator[CheckedCluster]:
    (tmp_path / "cluster").mkdir()
    with (
        Cluster(tmp_path / "cluster", is_plaintext=False) as cluster,
        cluster.client() as client,
    ):
        yield CheckedCluster(tmp_path, cluster, client)


@pytest.mark.full
@pytest.mark.parametrize("serve", [CheckedCluster.serve, CheckedCluster.train_and_serve])
def test_a_stage_that_two_nodes_find_wrong_is_banned_and_honest_ones_are_not_doubted(
    served_stages: CheckedCluster, serve: Callable[[CheckedCluster], None]
) -> None:
    settings = {"HYPERGPU_NODE_WORKER_MODULE": LYING_STAGE, "HYPERGPU_NODE_SANDBOX": "off"}
    served_stages.add_node(**settings)
    for _ in range(STAGES - 1):
        served_stages.add_node()
    serve(served_stages)
    for _ in range(2):
        served_stages.add_node()
    served_stages.wait_for_standby()
    ids = {each.name: each.id for each in served_stages.client.nodes()}
    liar_id = ids["node-0"]
    served_stages.doubts_until("contradict each other")
    served_stages.wait_for_standby()
    doubts = served_stages.doubts_until("2 nodes contradict it, which nobody else contradicts")
    assert {each.node for each in doubts} == {liar_id}
    assert len({each.checker for each in served_stages.events(StageCheckedEvent)}) == 2
    wait_until_ready(served_stages.client, served_stages.job)
    served_stages.client.stop(served_stages.job)
    for _ in served_stages.client.watch(served_stages.job):
        pass
    refusals = {each.node for each in served_stages.events(WindowRefusedEvent)}
    assert refusals == {liar_id}
