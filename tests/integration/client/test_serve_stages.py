"""A model in stages: three real nodes hold its layers, one is killed in mid-answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.ours.serving.standby import stands_by
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.token_engine import TokenEngine
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from hypergpu.journal.serving_events import RingPlacedEvent, StageMovedEvent
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.serving.calls import AnswerEnded, AnswerToken, ModelCall, Sampling
from hypergpu.statements import SignedReceipt
from hypergpu.user.client import Coordinator
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.starting import (
    ServeOrder,
    start_serving,
    wait_until_ready,
)
from tests.polling import first_true
from tests.processes import Cluster, NodeProcess
from tests.running_api import home_of, running_api
from tests.tiny_bases import save_base

GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=1.1, seed=5)
SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "15"}
"""So that an answer lasts long enough to be broken off."""
STAGES = 3


class ServedStages(NamedTuple):
    """A model on three of four nodes."""

    base: Path
    job: str
    nodes: dict[str, NodeProcess]
    """By their ids."""
    client: Coordinator
    cluster: Cluster

    def holders(self) -> list[str]:
        """Nodes that hold layers, in the order of the layers."""
        holders: dict[LayerSpan, str] = {}
        for event in self.client.read_events(self.job).until_newest():
            if isinstance(event.content, RingPlacedEvent):
                stages = event.content.stages
                holders = {} if event.content.is_whole else holders
                holders.update({stage.span: stage.node for stage in stages})
            elif isinstance(event.content, StageMovedEvent):
                move = event.content
                holders = {
                    span: move.to if node == move.node else node for span, node in holders.items()
                }
        return [holders[span] for span in sorted(holders)]

    def has_standby(self) -> bool:
        """Whether a node holds a stage ready."""
        return stands_by(self.client, self.job, lambda node: self.nodes[node].log)


@pytest.fixture(scope="module")
def ring_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStages]:
    folder = tmp_path_factory.mktemp("stages")
    base = save_base(folder, num_hidden_layers=6, max_position_embeddings=256)
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster", is_plaintext=False) as cluster, cluster.client() as client:
        processes = {
            f"node-{number}": cluster.add_nodes(
                1,
                "torch",
                kinds=("training", "serve"),
                settings={**SLOW, "HYPERGPU_NODE_NAME": f"node-{number}"},
            )[0]
            for number in range(STAGES + 1)
        }
        job = start_serving(client, ServeOrder(str(base), name="tiny", stages=STAGES)).job
        wait_until_ready(client, job)
        nodes = {each.id: processes[each.name] for each in client.nodes()}
        yield ServedStages(base, job, nodes, client, cluster)


@pytest.fixture(scope="module")
def whole(ring_model: ServedStages) -> TokenEngine:
    """The model in one process."""
    torch.set_num_threads(1)
    model = LanguageModel.load(ring_model.base, {}, torch.device("cpu"))
    return TokenEngine(TransformersModel(model))


def tokens_of_one_process(whole: TokenEngine, call: ModelCall) -> list[int]:
    conversation, tokens = whole.open(call), list[int]()
    while True:
        parts = conversation.step()
        tokens += [part.token for part in parts if isinstance(part, AnswerToken)]
        if parts and isinstance(parts[-1], AnswerEnded):
            return tokens


def ring_tokens(client: Coordinator, call: ModelCall) -> list[int]:
    return [part.token for part in client.answer("tiny", call) if isinstance(part, AnswerToken)]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("text", ["hello", "number 7 comes before number 8, which is what"])
def test_a_ring_gives_the_tokens_of_one_process(
    ring_model: ServedStages, whole: TokenEngine, sampling: Sampling, text: str
) -> None:
    call = ModelCall(text=text, sampling=sampling, new_tokens_most=40)
    assert ring_tokens(ring_model.client, call) == tokens_of_one_process(whole, call)


def test_several_conversations_each_get_what_they_get_alone(
    ring_model: ServedStages, whole: TokenEngine
) -> None:
    calls = [
        ModelCall(text=f"number {place} comes", sampling=GREEDY, new_tokens_most=24)
        for place in range(5)
    ]
    streams = [ring_model.client.answer("tiny", call) for call in calls]
    answers = [
        [part.token for part in stream if isinstance(part, AnswerToken)] for stream in streams
    ]
    assert answers == [tokens_of_one_process(whole, call) for call in calls]


@pytest.mark.parametrize(
    ("stage", "is_back_at_once"),
    [
        pytest.param(0, False, marks=pytest.mark.full),
        (1, False),
        pytest.param(2, True, marks=pytest.mark.full),
    ],
)
def test_an_answer_whose_stage_is_killed_goes_on_with_the_same_tokens(
    ring_model: ServedStages, whole: TokenEngine, stage: int, *, is_back_at_once: bool
) -> None:
    wait_until_ready(ring_model.client, ring_model.job)
    first_true(ring_model.has_standby)
    call = ModelCall(text="number 3 comes before", sampling=SEEDED, new_tokens_most=60)
    whole_tokens = tokens_of_one_process(whole, call)
    node = ring_model.holders()[stage]
    tokens: list[int] = []
    for part in ring_model.client.answer("tiny", call):
        if isinstance(part, AnswerToken):
            tokens.append(part.token)
            if len(tokens) == 12:
                ring_model.nodes[node].kill()
                if is_back_at_once:
                    ring_model.nodes[node].run()
    assert tokens == whole_tokens
    assert ring_model.holders()[stage] != node
    if not is_back_at_once:
        ring_model.nodes[node].run()


def test_a_coordinator_that_is_killed_finds_its_ring_again(
    ring_model: ServedStages, whole: TokenEngine
) -> None:
    call = ModelCall(text="hello", sampling=GREEDY, new_tokens_most=20)
    ring_model.cluster.coordinator.kill()
    ring_model.cluster.coordinator.start()
    with ring_model.cluster.client() as client:
        wait_until_ready(client, ring_model.job)
        assert ring_tokens(client, call) == tokens_of_one_process(whole, call)


def test_the_api_answers_by_a_ring_and_its_tokens_have_receipts(
    ring_model: ServedStages, tmp_path: Path
) -> None:
    wait_until_ready(ring_model.client, ring_model.job)
    with running_api(home_of(tmp_path, ring_model.client)) as api:
        settings: Any = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        answer = api.client.completions.create(prompt="hello", **settings)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    model = ServedModel(ring_model.client, ring_model.job, "tiny")
    assert model.generate("hello", new_tokens_most=12) == answer.choices[0].text
    model.stop()
    for _ in ring_model.client.watch(ring_model.job):
        pass
    holders = set(ring_model.holders())
    # They are signed a moment after the counts are settled.
    first_true(
        lambda: (
            {each.receipt.node for each in receipts_of(ring_model.client, ring_model.job)}
            >= holders
        )
    )


def receipts_of(client: Coordinator, job: str) -> list[SignedReceipt]:
    async def all_receipts() -> list[SignedReceipt]:
        return [each async for each in client.asynchronous.receipts(job)]

    return wait_for(all_receipts())
