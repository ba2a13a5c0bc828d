"""A GGUF file served: real nodes compute it by llama.cpp in their sandboxes, and are killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpu_node.shell.worker.serving.engine import is_last
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from gpu_node.shell.worker.serving.token_engine import TokenEngine
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import AnswerPart, AnswerToken, ModelCall, Sampling
from hypergpu.serving.serve_request import GGUF_FILE, GGUF_KIND, ServeRequest
from hypergpu.units import Bytes
from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import AnswerRoute
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.starting import (
    ServeOrder,
    model_named,
    start_serving,
    wait_until_ready,
)
from hypergpu.workloads.gguf.writing import write_gguf
from tests.gguf_files import Tensor, gguf_content
from tests.polling import first_true
from tests.processes import Cluster, NodeProcess
from tests.tiny_bases import save_base

CHAT: Any = [{"role": "user", "content": "hello there"}]
SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "25"}


class ServedFile(NamedTuple):
    """A GGUF file on two nodes."""

    cluster: Cluster
    file: Path
    job: str
    nodes: dict[str, NodeProcess]

    def wait_for(self, client: Coordinator) -> None:
        """Wait until both replicas are ready and answer nothing."""

        def is_so() -> bool:
            model = model_named(client, self.job)
            return (model.ready_replicas, model.open_calls) == (2, 0)

        first_true(is_so)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFile]:
    folder = tmp_path_factory.mktemp("gguf")
    file = folder / "tiny llama.gguf"
    write_gguf(save_base(folder), file)
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster", is_plaintext=False) as cluster:
        nodes = {}
        for name in ("one", "two"):
            settings = {**SLOW, "HYPERGPU_NODE_NAME": name}
            kinds = ("training", "serve")
            (nodes[name],) = cluster.add_nodes(1, "torch", kinds=kinds, settings=settings)
        with cluster.client() as client:
            job = start_serving(client, ServeOrder(str(file), replicas=2)).job
            deployment = ServedFile(cluster, file, job, {})
            deployment.wait_for(client)
            deployment.nodes.update({each.id: nodes[each.name] for each in client.nodes()})
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: ServedFile) -> Iterator[Coordinator]:
    with deployment.cluster.client() as client:
        yield client


def tokens_of(parts: list[Any]) -> list[int]:
    return [part.token for part in parts if isinstance(part, AnswerToken)]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=1.1, top_p=0.95, seed=4)]
)
def test_an_answer_is_that_of_the_file_alone_and_goes_on_where_its_node_is_killed(
    deployment: ServedFile, client: Coordinator, sampling: Sampling
) -> None:
    call = ModelCall(text="the cat sat", sampling=sampling, new_tokens_most=40)
    conversation = TokenEngine(GgufModel(deployment.file)).open(call)
    parts: list[AnswerPart] = []
    while not is_last(parts):
        parts += conversation.step()
    conversation.close()
    alone = tokens_of(parts)
    assert len(alone) > 12
    deployment.wait_for(client)
    tokens: list[int] = []
    routes: list[AnswerRoute] = []
    for part in client.answer(deployment.job, call):
        if isinstance(part, AnswerRoute):
            routes.append(part)
        elif isinstance(part, AnswerToken):
            tokens.append(part.token)
            if len(tokens) == 6:
                deployment.nodes[routes[0].node].kill()
    # On like processors; the fingerprint does not promise it.
    assert tokens == alone
    assert len(routes) == 2
    assert all(route.fingerprint.endswith("-cpu-similar") for route in routes)
    deployment.nodes[routes[0].node].run()
    deployment.wait_for(client)


def test_python_chats_with_a_file(deployment: ServedFile, client: Coordinator) -> None:
    view = model_named(client, deployment.job)
    assert view.model == "tiny-llama"
    model = ServedModel(client, deployment.job, view.model)
    assert model.generate(CHAT, new_tokens_most=5)
    with pytest.raises(HyperGPUError, match="this model takes 128"):
        model.generate("hello", new_tokens_most=1_000)


def test_a_malformed_file_is_refused_here_and_by_a_node_that_is_sent_it(
    deployment: ServedFile, client: Coordinator, tmp_path: Path
) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(gguf_content(tensors=[Tensor(b"a", (1 << 60,), 0, 0)]))
    with pytest.raises(HyperGPUError, match=r"no GGUF that may be opened: the tensor 'a'"):
        start_serving(client, ServeOrder(str(file)))
    client.stop(deployment.job)
    client.send_blobs([file], step="sending")
    blob = BlobRef(digest_of_file(file), Bytes(file.stat().st_size))
    request = ServeRequest(model="bad", files={GGUF_FILE: blob}, engine=GGUF_KIND)
    job = client.create_serve(request, request_id="bad")
    with pytest.raises(HyperGPUError, match=r"no GGUF that may be opened: the tensor 'a'"):
        wait_until_ready(client, job)
