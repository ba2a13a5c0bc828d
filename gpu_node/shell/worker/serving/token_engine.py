"""An engine of any model that gives logits, and the check that it gives them token by token."""

import torch

from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import EngineMemory, TokenModel
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
    """

    def __init__(self, model: TokenModel, context_most: int = 0) -> None:
        limits = [each for each in (context_most, model.tokens_most) if each]
        self._model = model
        self.tokens_most = min(limits, default=_CONTEXT_USUAL)
        """See `AnswerEngine`."""

    @classmethod
    def of(cls, replica: Replica, model: TokenModel) -> "TokenEngine":
        """The engine of a replica.

        Raises:
            ShardError: The model keeps its state otherwise than token by token.
        """
        check_steps(model)
        return cls(model, replica.context_most)

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
        begin = ModelConversation if call.claim is None else AnswerCheck
        return begin(self._model, call, self.tokens_most)


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
