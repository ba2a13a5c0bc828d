"""A server of a node's owner answers calls to a served model, through the node alone."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready
from hypergpu.workloads.gguf.writing import write_gguf
from tests.openai_server import llama_server
from tests.processes import Cluster
from tests.tiny_bases import save_base

KEY = "sk-owner-8842"
PROMPT = "zebra crossing 4471"


class ServerNode(NamedTuple):
    """A cluster whose one node has a server."""

    cluster: Cluster
    client: Coordinator


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerNode]:
    folder = tmp_path_factory.mktemp("servers")
    write_gguf(save_base(folder), folder / "tiny.gguf")
    key_file = folder / "owner.key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    (folder / "cluster").mkdir()
    with (
        llama_server(folder / "tiny.gguf", "tiny:1b", KEY) as url,
        Cluster(folder / "cluster", is_plaintext=False) as cluster,
    ):
        lines = f'[server]\nurl = "{url}"\nmodels = ["tiny:1b"]\nkey_file = "{key_file}"\n'
        kinds = ("training", "serve")
        cluster.add_nodes(1, "numpy", kinds=kinds, owner_lines=lines)
        with cluster.client() as client:
            yield ServerNode(cluster, client)


def test_an_owner_s_server_answers_and_neither_key_nor_text_is_in_any_file(
    node: ServerNode,
) -> None:
    order = ServeOrder("tiny:1b", on_servers=True)
    view = start_serving(node.client, order)
    wait_until_ready(node.client, view.job)
    model = ServedModel(node.client, view.job, view.model)
    text = model.generate(PROMPT, new_tokens_most=12)
    assert text
    assert model.generate([{"role": "user", "content": PROMPT}], new_tokens_most=4)
    needles = [PROMPT.encode(), KEY.encode()]
    files = [path for path in node.cluster.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files)
    assert not [path for path in files if any(each in path.read_bytes() for each in needles)]
    model.stop()


def test_a_model_that_the_owner_does_not_name_is_refused_with_those_that_it_does(
    node: ServerNode,
) -> None:
    view = start_serving(node.client, ServeOrder("gpt-5", on_servers=True))
    with pytest.raises(HyperGPUError, match="offers tiny:1b and no model 'gpt-5'"):
        wait_until_ready(node.client, view.job)
    node.client.stop(view.job)
