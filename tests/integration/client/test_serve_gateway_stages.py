"""A model in stages whose nodes all dial gateways: hidden states pass through them, sealed."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.token_engine import TokenEngine
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.user.client import Coordinator
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready
from tests.gateway_process import GatewayProcess, operator_token
from tests.integration.client.test_serve_stages import tokens_of_one_process
from tests.processes import Cluster
from tests.tiny_bases import save_base

pytestmark = pytest.mark.full
STAGES = 3
SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "15"}
CALL = ModelCall(
    text="number 7 comes before number 8", sampling=Sampling(temperature=0.0), new_tokens_most=40
)


class FrontedStages(NamedTuple):
    """A ring behind two gateways of one address."""

    base: Path
    gateways: list[GatewayProcess]
    client: Coordinator

    def answer(self, call: ModelCall, kill_after: int = 0) -> list[int]:
        """Tokens of an answer; after so many the gateway of most nodes is killed, unless 0."""
        tokens = list[int]()
        for part in self.client.answer("tiny", call):
            if isinstance(part, AnswerToken):
                tokens.append(part.token)
                if len(tokens) == kill_after:
                    max(self.gateways, key=lambda each: each.nodes).end()
        return tokens


@pytest.fixture(scope="module")
def gateway_ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontedStages]:
    folder = tmp_path_factory.mktemp("gateway_ring")
    base = save_base(folder, num_hidden_layers=6, max_position_embeddings=256)
    (folder / "cluster").mkdir()
    with ExitStack() as owner:
        cluster = owner.enter_context(Cluster(folder / "cluster", is_plaintext=False))
        client = owner.enter_context(cluster.client())
        token = operator_token(cluster.coordinator)
        gateways = [GatewayProcess(token, folder / "gateway-0.log")]
        owner.callback(gateways[0].end)
        gateways.append(GatewayProcess(token, folder / "gateway-1.log", *gateways[0].ports))
        owner.callback(gateways[1].end)
        for number in range(STAGES):
            cluster.add_nodes(
                1,
                "torch",
                kinds=("training", "serve"),
                settings={**SLOW, "HYPERGPU_NODE_NAME": f"node-{number}"},
                token=gateways[0].token(cluster.coordinator),
            )
        job = start_serving(client, ServeOrder(str(base), name="tiny", stages=STAGES)).job
        wait_until_ready(client, job)
        yield FrontedStages(base, gateways, client)


@pytest.fixture(scope="module")
def expected_tokens(gateway_ring: FrontedStages) -> list[int]:
    """Those that one process gives with all layers."""
    torch.set_num_threads(1)
    model = LanguageModel.load(gateway_ring.base, {}, torch.device("cpu"))
    return tokens_of_one_process(TokenEngine(TransformersModel(model)), CALL)


def test_a_ring_behind_gateways_gives_the_tokens_of_one_process(
    gateway_ring: FrontedStages, expected_tokens: list[int]
) -> None:
    assert sum(gateway.nodes for gateway in gateway_ring.gateways) >= STAGES
    assert gateway_ring.answer(CALL) == expected_tokens


def test_an_answer_goes_on_with_the_same_tokens_where_a_gateway_is_killed(
    gateway_ring: FrontedStages, expected_tokens: list[int]
) -> None:
    assert gateway_ring.answer(CALL, kill_after=10) == expected_tokens
