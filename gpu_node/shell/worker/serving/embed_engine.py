"""Kind ``serve/embed``: a model of sentence-transformers gives the vectors of texts.

Each text is computed by itself, so that its vector does not depend on who else asks.
"""

from collections.abc import Callable

import numpy as np

from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.embed import SentenceEmbedder
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.engine import (
    CallTooLongError,
    EngineMemory,
    UnanswerableCallError,
)
from gpu_node.shell.worker.serving.replica_engine import EngineTraits, ReplicaEngine
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerVector,
    ModelCall,
)
from hypergpu.serving.serve_request import EMBED_KIND, Replica
from hypergpu.units import Bytes

_TOKENS_USUAL = 8_192
"""Tokens of a text at most where the model states no limit."""


class EmbedEngine:
    """See `AnswerEngine`. A text that the model would cut is refused.

    Args:
        embedder: Loaded.
        context_most: Tokens of a text at most; 0: as many as the model takes.
    """

    def __init__(self, embedder: SentenceEmbedder, context_most: int = 0) -> None:
        limits = [each for each in (context_most, embedder.tokens_most) if each]
        self._embedder = embedder
        self.tokens_most = min(limits, default=_TOKENS_USUAL)
        """See `AnswerEngine`."""
        self.memory = EngineMemory(Bytes(embedder.weights_bytes), Bytes(0))
        """See `AnswerEngine`."""

    @property
    def device(self) -> str:
        """See `AnswerEngine`."""
        return self._embedder.device

    def open(self, call: ModelCall) -> "TextEmbedding":
        """See `AnswerEngine.open`."""
        text = call.text
        if text is None:
            raise UnanswerableCallError("a vector is of a text")
        tokens = self._embedder.token_count(text)
        if tokens > self.tokens_most:
            detail = f"the text has {tokens} tokens; this model takes {self.tokens_most}"
            raise CallTooLongError(detail)
        return TextEmbedding(self._embedder, text, tokens)


class TextEmbedding:
    """See `EngineConversation`: one text."""

    def __init__(self, embedder: SentenceEmbedder, text: str, tokens: int) -> None:
        self._embedder = embedder
        self._text = text
        self.tokens_most = tokens
        """See `EngineConversation`."""

    def step(self) -> list[AnswerPart]:
        """See `EngineConversation.step`."""
        vector = self._embedder.embed([self._text])[0]
        if not np.isfinite(vector).all():
            raise UnanswerableCallError("the vector holds values that are not finite numbers")
        numbers = vector.astype("<f4").tobytes()
        return [AnswerBegun(self.tokens_most), AnswerVector(numbers), AnswerEnded("stop")]

    def close(self) -> None:
        """See `EngineConversation.close`."""


def engine_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What answers calls; it keeps its model from one lease to the next."""
    models = KeptModel(SentenceEmbedder)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        replica = unpack_work(request.work, EMBED_KIND, Replica)
        base = Bundle(start=0, items=0, files=replica.files, parameters={"dtype": replica.dtype})
        engine = EmbedEngine(models.of(request, base), replica.context_most)
        libraries = ("torch", "transformers", "sentence-transformers")
        traits = EngineTraits(libraries=libraries, gives_vectors=True)
        ReplicaEngine(request, callbacks, engine, replica, traits).answer_calls()

    return perform


perform = engine_performer()
"""See `gpu_node.shell.worker.performers.Perform`."""
