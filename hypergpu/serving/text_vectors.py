"""Calls for the vectors of texts, and what comes of them."""

from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.calls import (
    VECTOR_NUMBERS_MOST,
    AnswerBegun,
    AnswerRefused,
    AnswerVector,
    ModelCall,
)

_NUMBER_BYTES = 4


def vector_call(text: str) -> ModelCall:
    """The call that asks for a text's vector."""
    return ModelCall(text=text, wants_vector=True, new_tokens_most=1)


class TextVector(NamedTuple):
    """What a model of embeddings gave for a text."""

    numbers: bytes
    """``float32``, little-endian."""
    tokens: int
    """Tokens of the text."""


class VectorReader:
    """Reads the parts of an answer to `vector_call`."""

    def __init__(self) -> None:
        self.refusal: AnswerRefused | None = None
        """Why there is no vector."""
        self.tokens = 0
        """Tokens of the text."""
        self._numbers = b""

    def note(self, part: object) -> None:
        """Take a part in."""
        match part:
            case AnswerBegun():
                self.tokens = part.prompt_tokens
            case AnswerVector():
                self._numbers = part.numbers
            case AnswerRefused():
                self.refusal = part
            case _:
                pass

    def vector(self) -> TextVector:
        """The vector, after the last part.

        Raises:
            HyperGPUError: REQUEST_INVALID, the model refused the text or gave no vector.
        """
        if self.refusal is not None:
            raise HyperGPUError(Reason.REQUEST_INVALID, self.refusal.reason)
        count, rest = divmod(len(self._numbers), _NUMBER_BYTES)
        if rest or not 0 < count <= VECTOR_NUMBERS_MOST:
            raise HyperGPUError(Reason.REQUEST_INVALID, "the model gave no vector")
        return TextVector(self._numbers, self.tokens)
