"""The protocols of engines. `tests/unit/worker/test_engines.py` is what each of them passes.

An *engine* answers calls. Most hold a *token model*, which gives the logits of the next token, and
`token_engine.TokenEngine` makes answers of them: so draws, stops, log-probabilities and limits are
the same whatever computes. An engine that reaches a whole server gives the parts of answers itself.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from gpu_node.shell.worker.serving.prefix_states import HeldPrefix, PrefixState
from hypergpu.serving.calls import (
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    CheckResult,
    ModelCall,
    VersionTaken,
)
from hypergpu.serving.tuned_model import VersionOffer
from hypergpu.units import Bytes

if TYPE_CHECKING:
    import torch


class UnanswerableCallError(Exception):
    """The model cannot answer the call. The text says why."""

    is_too_long = False
    is_lasting = True
    """Whether another replica would refuse it, too."""


class CallTooLongError(UnanswerableCallError):
    """Its prompt leaves no room for the answer."""

    is_too_long = True


class VersionAbsentError(UnanswerableCallError):
    """The replica does not hold the version that the answer began with."""

    is_lasting = False


class EngineMemory(NamedTuple):
    """Memory that a loaded model takes; 0: not known."""

    weights_bytes: Bytes
    token_bytes: Bytes
    """State that a conversation keeps for each of its tokens."""

    def conversation_bytes(self, tokens: int) -> Bytes:
        """State of a conversation of so many tokens."""
        return Bytes(self.token_bytes * tokens)


class TokenReader(Protocol):
    """One text as a model has read it so far."""

    def read(self, tokens: Sequence[int]) -> "torch.Tensor":
        """Read on, at least one token; gives the logits of the next one, float[vocabulary].

        The tensor is valid until the next read.
        """
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


@runtime_checkable
class ScoringReader(TokenReader, Protocol):
    """A reader of an engine that scores answers of others: it gives all logits of one pass."""

    def read_each(self, tokens: Sequence[int]) -> "torch.Tensor":
        """Read on; gives the logits after each token, float[tokens, vocabulary]."""
        ...


@runtime_checkable
class KeepingReader(TokenReader, Protocol):
    """A reader whose state another one may go on from."""

    def take_state(self) -> PrefixState | None:
        """What it has read, for `KeepingModel.resume_reader`; it reads no more.

        None: the model keeps its state otherwise than token by token.
        """
        ...


class TextModel(Protocol):
    """A model's tokens and their text."""

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows."""
        ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Tokens of a chat by the model's own template, up to where the answer begins.

        Raises:
            UnanswerableCallError: There is no template, or it refuses the messages.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens without special ones; U+FFFD where a character is not whole."""
        ...


class ReadingModel(TextModel, Protocol):
    """A model's tokens, with what reads them."""

    def open_reader(self, tokens_most: int) -> TokenReader:
        """Begin a text of at most so many tokens.

        Raises:
            MemoryError: There is none left for it.
        """
        ...


class TokenModel(ReadingModel, Protocol):
    """A loaded model with its tokenizer."""

    @property
    def device(self) -> str:
        """Kind of the device that it computes on, as `torch.device.type`."""
        ...

    @property
    def tokens_most(self) -> int | None:
        """Tokens of a text at most; None: it states no limit."""
        ...

    @property
    def memory(self) -> EngineMemory:
        """Memory that it takes."""
        ...

    @property
    def step_error_most(self) -> float:
        """Largest difference of logits between one pass and several, relative to the largest one,
        by which rounding may explain it.
        """
        ...

    @property
    def rounds_by_piece(self) -> bool:
        """Whether tokens that are read at once leave other digits than one after another."""
        ...


@runtime_checkable
class KeepingModel(Protocol):
    """A token model whose readers go on from states of others."""

    def resume_reader(self, tokens_most: int, prefix: HeldPrefix) -> TokenReader | None:
        """A reader that has read the first tokens of a state, which becomes its own.

        None: the state cannot be cut there, and is lost.

        Raises:
            MemoryError: There is none left for it.
        """
        ...


class EngineConversation(Protocol):
    """One call that is being answered. Its memory is taken by the first step."""

    @property
    def tokens_most(self) -> int:
        """Tokens of its prompt and answer at most."""
        ...

    def step(self) -> list[AnswerPart]:
        """Go on a little, by a token at most; the last parts are of `is_last`.

        Raises:
            MemoryError: There is none left for it.
        """
        ...

    def close(self) -> None:
        """Stop, and give its memory back. May be called twice."""
        ...


class AnswerEngine(Protocol):
    """Answers calls."""

    @property
    def tokens_most(self) -> int:
        """Tokens of a prompt and its answer at most."""
        ...

    @property
    def device(self) -> str:
        """Kind of its device, for people."""
        ...

    @property
    def memory(self) -> EngineMemory:
        """Memory that its model takes."""
        ...

    def open(self, call: ModelCall) -> EngineConversation:
        """Begin to answer.

        Args:
            call: Checked.

        Raises:
            UnanswerableCallError: The model cannot answer it, here or elsewhere.
            MemoryError: There is none left for it.
        """
        ...


class ModelVersions(Protocol):
    """Versions of a training's model that an engine holds."""

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of the versions, the newest last."""
        ...

    def take_up(self, offer: VersionOffer) -> None:
        """Load a version, whose blob is among the inputs.

        Raises:
            ShardError: It cannot be loaded.
            MemoryError: There is none left for it.
        """
        ...


_LAST_PARTS = (AnswerEnded, AnswerRefused, CheckResult, VersionTaken)


def is_last(parts: Sequence[AnswerPart]) -> bool:
    """Whether the answer is over with these parts."""
    return bool(parts) and isinstance(parts[-1], _LAST_PARTS)
