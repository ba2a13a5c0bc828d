"""A served model of embeddings gives the vectors of sentence-transformers, text by text."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_node.shell.worker.farm.embed import SentenceEmbedder
from gpu_node.shell.worker.serving.embed_engine import EmbedEngine
from gpu_node.shell.worker.serving.engine import CallTooLongError, is_last
from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import AnswerBegun, AnswerRefused
from hypergpu.serving.text_vectors import VectorReader, vector_call
from tests.bundles import counting_texts
from tests.tiny_bases import save_encoder

TEXTS = counting_texts(5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("embed") / "base")


@pytest.fixture(scope="module")
def engine(base: Path) -> EmbedEngine:
    return EmbedEngine(SentenceEmbedder(base, {}, torch.device("cpu")))


def test_vectors_are_those_of_sentence_transformers(engine: EmbedEngine, base: Path) -> None:
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(str(base), device="cpu")
    for text in TEXTS:
        reader = VectorReader()
        conversation = engine.open(vector_call(text))
        parts = conversation.step()
        assert is_last(parts)
        for part in parts:
            reader.note(part)
        vector = reader.vector()
        assert vector.tokens == conversation.tokens_most > 0
        np.testing.assert_allclose(
            np.frombuffer(vector.numbers, "<f4"), plain.encode(text), atol=1e-5
        )


def test_a_text_that_would_be_cut_is_refused(engine: EmbedEngine) -> None:
    assert engine.tokens_most == 64
    with pytest.raises(CallTooLongError, match="this model takes 64"):
        engine.open(vector_call("hello " * 100))


def test_an_engine_tells_the_memory_of_its_weights(engine: EmbedEngine) -> None:
    assert engine.memory.weights_bytes > 10_000
    assert engine.memory.conversation_bytes(64) == 0


def test_an_answer_without_a_vector_is_refused() -> None:
    reader = VectorReader()
    reader.note(AnswerBegun(3))
    with pytest.raises(HyperGPUError, match="gave no vector"):
        reader.vector()
    reader.note(AnswerRefused("too long"))
    with pytest.raises(HyperGPUError, match="too long"):
        reader.vector()
