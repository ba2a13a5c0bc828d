"""An engine of any model that gives logits, and the check that it gives them token by token."""

import torch

from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import EngineMemory, TokenModel
from gpu_node.shell.worker.serving.prefix_states import PrefixStates
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.serve_request import Replica

_CONTEXT_USUAL = 8_192
"""Tokens at most where neither the model nor its user states a limit."""
_CHECK_TOKENS = 8


class TokenEngine:
    """Answers calls by the logits of a model.

    Args:
        model: Gives them.
        context_most: Tokens of a prompt and its answer at most; 0: as many as the model takes.
        prefixes: What calls before have read; None: nothing is kept.
    """

    def __init__(
        self, model: TokenModel, context_most: int = 0, prefixes: PrefixStates | None = None
    ) -> None:
        limits = [each for each in (context_most, model.tokens_most) if each]
        self._model = model
        self._prefixes = prefixes
        self.tokens_most = min(limits, default=_CONTEXT_USUAL)
        """See `AnswerEngine`."""

    @classmethod
    def of(cls, replica: Replica, model: TokenModel, prefixes: PrefixStates) -> "TokenEngine":
        """The engine of a replica.

        Raises:
            ShardError: The model keeps its state otherwise than token by token.
        """
        check_steps(model)
        return cls(model, replica.context_most, prefixes)

    @property
    def device(self) -> str:
        """See `AnswerEngine`."""
        return self._model.device

    @property
    def memory(self) -> EngineMemory:
        """See `AnswerEngine`."""
        return self._model.memory

    def open(self, call: ModelCall) -> ModelConversation | AnswerCheck:
        """See `AnswerEngine.open`."""
        return self._begin(self._model, call)

    def _begin(self, model: TokenModel, call: ModelCall) -> ModelConversation | AnswerCheck:
        if call.claim is not None:
            return AnswerCheck(model, call, self.tokens_most)
        return ModelConversation(model, call, self.tokens_most, prefixes=self._prefixes)


@torch.inference_mode()
def check_steps(model: TokenModel) -> None:
    """Require that a text read in two passes gives what one pass gives.

    Raises:
        ShardError: The model keeps its state otherwise than token by token.
    """
    tokens = [place * 7919 % model.vocabulary for place in range(_CHECK_TOKENS)]
    whole = _logits_of(model, [tokens])
    last = _logits_of(model, [tokens[:-1], tokens[-1:]])
    error = float((last - whole).abs().max() / whole.abs().max())
    if not error <= model.step_error_most:
        detail = f"the model gives other numbers token by token than at once ({error:.2g} relative)"
        raise ShardError(f"{detail}: it cannot be served by this engine")


def _logits_of(model: TokenModel, pieces: list[list[int]]) -> torch.Tensor:
    """Logits after a text that is read in pieces."""
    reader = model.open_reader(sum(map(len, pieces)))
    try:
        for piece in pieces[:-1]:
            reader.read(piece)
        return reader.read(pieces[-1]).float().clone()
    finally:
        reader.close()
