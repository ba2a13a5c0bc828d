"""One call that is being answered: its prompt is read in pieces, then token follows token.

A conversation is computed by itself, whatever else the model answers at the time: so an answer
depends on its call alone, and another replica that goes on with it computes the same numbers but
for the order of sums.
"""

import torch

from gpu_node.shell.worker.serving.answer_writer import AnswerWriter
from gpu_node.shell.worker.serving.engine import (
    KeepingModel,
    KeepingReader,
    TokenModel,
    TokenReader,
)
from gpu_node.shell.worker.serving.prefix_states import PrefixKey, PrefixStates
from hypergpu.serving.calls import AnswerBegun, AnswerPart, AnswerToken, ModelCall

PIECE_TOKENS = 512
REPEATED_STEPS_MOST = 64
"""Tokens of another replica that are read one after another, as that one did: more of them would
keep the caller waiting.
"""


class ModelConversation:
    """One call to a loaded model.

    Args:
        model: Answers.
        call: Checked.
        tokens_most: Tokens of prompt and answer at most.
        piece_tokens: Tokens of a prompt that are read at a time, so that other conversations get
            their turn.
        prefixes: What calls before have read; None: nothing is kept.

    Raises:
        UnanswerableCallError: The prompt cannot be read, or leaves no room for an answer.
        MemoryError: There is none left for it.
    """

    def __init__(
        self,
        model: TokenModel,
        call: ModelCall,
        tokens_most: int,
        *,
        piece_tokens: int = PIECE_TOKENS,
        prefixes: PrefixStates | None = None,
    ) -> None:
        self._piece_tokens = piece_tokens
        self._model = model
        self._call = call
        self._writer = AnswerWriter(model, call, tokens_most)
        self._unread = [*self._writer.prompt, *call.tokens_out]
        self._has_begun = False
        self.tokens_most = self._writer.tokens_most
        """Tokens of its prompt and answer at most."""
        self._reader: TokenReader | None = None
        self._prefixes = prefixes
        self._text: list[int] = []
        """Tokens that the reader has read."""
        self._is_whole = True
        """Whether the reader has read all of them: it may fail on the way."""

    @torch.inference_mode()
    def step(self) -> list[AnswerPart]:
        """See `EngineConversation.step`: read a piece of the prompt, or add a token."""
        if self._reader is None:
            self._reader = self._open_reader()
        held_tokens = len(self._text)
        size = self._piece_size()
        piece, self._unread = self._unread[:size], self._unread[size:]
        self._is_whole = False
        logits = self._reader.read(piece)
        self._is_whole = True
        self._text += piece
        begin: list[AnswerPart] = []
        if not self._has_begun:
            self._has_begun = True
            begin.append(AnswerBegun(len(self._writer.prompt), held_tokens))
        if self._unread:
            return begin
        parts = self._writer.next_parts(logits)
        self._unread = [part.token for part in parts if isinstance(part, AnswerToken)]
        return [*begin, *parts]

    def _open_reader(self) -> TokenReader:
        """A reader that has read as much of the text as is kept of calls before."""
        model = self._model
        # Digits of tokens that are out follow from how they are read.
        repeats_steps = bool(self._call.tokens_out) and model.rounds_by_piece
        if self._prefixes is not None and isinstance(model, KeepingModel):
            text = [] if repeats_steps else self._unread[:-1]  # the last one gives logits
            prefix = self._prefixes.take(self._prefix_key, text)
            if prefix is not None and (reader := model.resume_reader(self.tokens_most, prefix)):
                self._text = self._unread[: prefix.tokens]
                self._unread = self._unread[prefix.tokens :]
                return reader
        return model.open_reader(self.tokens_most)

    @property
    def _prefix_key(self) -> PrefixKey:
        return PrefixKey(self._call.prefix_scope, self._call.version)

    def _piece_size(self) -> int:
        """How many tokens are read next."""
        tokens_out = len(self._call.tokens_out)
        repeats_steps = self._model.rounds_by_piece and tokens_out <= REPEATED_STEPS_MOST
        prompt_rest = len(self._unread) - tokens_out
        if repeats_steps and tokens_out and self._writer.count == tokens_out:
            return min(self._piece_tokens, prompt_rest) if prompt_rest > 0 else 1
        return self._piece_tokens

    def close(self) -> None:
        """See `EngineConversation.close`: what was read is kept, where there is room."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        prefixes = self._prefixes
        if prefixes is not None and self._call.prefix_scope and self._is_whole:
            state = reader.take_state() if isinstance(reader, KeepingReader) else None
            if state is not None:
                prefixes.keep(self._prefix_key, self._text, state)
        reader.close()
