"""Texts stay on nodes that an operator gave the model's labels, checks included; and calls of keys
of a higher priority go first.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import AnswerBegun, AnswerEnded, ModelCall, unpack_call
from hypergpu.serving.serve_request import ENGINE_KIND, ENGINE_VERSION
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.models import AnswerRoute, ServedModelView
from tests.kinds.serving.small_model import serve_small_model
from tests.kinds.serving.wire_replica import WireReplica, first_model, open_user, replicas
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster

CALL = ModelCall(text="hello", new_tokens_most=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("trust"), *NOBODY_LOST) as cluster:
        yield cluster


async def join(cluster: Cluster) -> tuple[WireNode, WireReplica]:
    """A node that says that it has every label, and what it may hold."""
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await node.join(cluster.coordinator.node_token())
    return node, WireReplica(node, node.control([(ENGINE_KIND, ENGINE_VERSION)]))


async def test_texts_go_to_nodes_with_the_label_alone_until_it_is_taken(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with open_user(cluster) as user:
        job = await serve_small_model(user, tmp_path, replicas=2, trusted=("home",))
        (first_node, first), (second_node, _) = await join(cluster), await join(cluster)
        with cluster.client() as operator:
            with pytest.raises(HyperGPUError, match="is no label"):
                operator.label_node(first_node.node_id, ["Home!"])
            operator.label_node(first_node.node_id, ["home", "ours"])
            view = operator.find_node(first_node.node_id)
            assert view.trust_labels == ("home", "ours")
            await first.begin()
            model = await first_model(user, lambda model: model.ready_replicas)
            assert model.reason == "1 of 2 replicas are on nodes, the rest waits for more nodes"
            assert operator.find_node(second_node.node_id).job is None
            operator.label_node(first_node.node_id, ["ours"])
            model = await first_model(user, lambda model: not model.ready_replicas)
        assert "an operator took its label" in model.reason
        await user.stop(job)
        for node in (first_node, second_node):
            await node.close()


async def test_a_user_gives_no_labels(cluster: Cluster) -> None:
    async with open_user(cluster) as user:
        with pytest.raises(HyperGPUError, match="takes the role operator"):
            await user.label_node("0x" + "00" * 20, ["home"])


async def answer(user: AsyncCoordinator, priority: int, reasons: list[str]) -> None:
    call = ModelCall(text=str(priority), new_tokens_most=3, priority=priority)
    parts = [part async for part in user.answer("small", call)]
    reasons += [part.reason for part in parts if isinstance(part, AnswerRoute)]


def has_waiting_calls(count: int, model: ServedModelView) -> bool:
    return model.waiting_calls >= count


async def test_a_call_of_a_higher_priority_goes_before_those_that_wait(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with replicas(cluster, tmp_path, 1, conversations_most=1) as (user, (wire,)):
        reasons: list[str] = []
        tasks = [asyncio.create_task(answer(user, 0, reasons))]
        number, texts = (await wire.next_call()).call, []
        for waiting_calls, priority in enumerate((0, -1, 4), 1):
            tasks.append(asyncio.create_task(answer(user, priority, reasons)))
            await first_model(user, partial(has_waiting_calls, waiting_calls))
        for _ in range(3):
            wire.say(number, AnswerBegun(1), AnswerEnded("stop"), is_last=True)
            message = await wire.next_call()
            number = message.call
            texts.append(unpack_call(message.body).text)
        wire.say(number, AnswerBegun(1), AnswerEnded("stop"), is_last=True)
        await asyncio.gather(*tasks)
        assert texts == ["4", "0", "-1"]
        assert "waited before 2 calls of lower priority" in reasons[1]
