"""Vectors by OpenAI's own client and from Python: a real node holds the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.starting import ServeOrder, start_serving, wait_until_ready
from tests.bundles import counting_texts
from tests.processes import Cluster
from tests.running_api import RunningApi, home_of, running_api
from tests.tiny_bases import save_encoder

TEXTS = counting_texts(20)


class EmbedCluster(NamedTuple):
    """A model of embeddings on a node, with the API."""

    client: Coordinator
    job: str
    api: RunningApi
    base: Path

    def plain_vectors(self, texts: list[str]) -> NDArray[np.float32]:
        """The same without us."""
        from sentence_transformers import SentenceTransformer

        vectors: NDArray[np.float32] = SentenceTransformer(str(self.base), device="cpu").encode(
            texts
        )
        return vectors


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbedCluster]:
    folder = tmp_path_factory.mktemp("embeddings")
    base = save_encoder(folder / "base")
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster") as cluster, cluster.client() as client:
        cluster.add_nodes(1, "torch", kinds=("training", "serve"))
        job = start_serving(client, ServeOrder(str(base), name="vectors")).job
        wait_until_ready(client, job)
        with running_api(home_of(folder, client)) as api:
            yield EmbedCluster(client, job, api, base)


def test_openai_s_client_gets_the_vectors_of_sentence_transformers(
    embeddings: EmbedCluster,
) -> None:
    plain = embeddings.plain_vectors(TEXTS)
    answer = embeddings.api.client.embeddings.create(model="vectors", input=TEXTS)
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose([each.embedding for each in answer.data], plain, atol=1e-5)
    assert answer.usage.prompt_tokens > len(TEXTS)
    (one,) = embeddings.api.client.embeddings.create(
        model="vectors", input=TEXTS[3], encoding_format="float"
    ).data
    np.testing.assert_allclose(one.embedding, plain[3], atol=1e-5)


def test_python_gets_an_array(embeddings: EmbedCluster) -> None:
    model = ServedModel(embeddings.client, embeddings.job, "vectors")
    np.testing.assert_allclose(
        model.embed(TEXTS[:3]), embeddings.plain_vectors(TEXTS[:3]), atol=1e-5
    )
    with pytest.raises(HyperGPUError, match="this model takes 64"):
        model.embed(["hello " * 100])
    with pytest.raises(HyperGPUError, match="writes no texts"):
        model.generate("hello")


def test_what_cannot_be_embedded_is_refused_in_the_form_of_openai(
    embeddings: EmbedCluster,
) -> None:
    client = embeddings.api.client
    with pytest.raises(openai.BadRequestError) as refusal:
        client.embeddings.create(model="vectors", input=["fine", "hello " * 100])
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="vectors", input="hello", dimensions=8)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="hello")
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.completions.create(model="vectors", prompt="hello", max_tokens=2)
