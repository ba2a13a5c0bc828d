"""One call that is being answered: its prompt is read in pieces, then token follows token.

A conversation is computed by itself, whatever else the model answers at the time: so an answer
depends on its call alone, and another replica that goes on with it computes the same numbers but
for the order of sums.
"""

import torch

from gpu_node.shell.worker.serving.answer_writer import AnswerWriter
from gpu_node.shell.worker.serving.engine import TokenModel, TokenReader
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

    @torch.inference_mode()
    def step(self) -> list[AnswerPart]:
        """See `EngineConversation.step`: read a piece of the prompt, or add a token."""
        if self._reader is None:
            self._reader = self._model.open_reader(self.tokens_most)
        size = self._piece_size()
        piece, self._unread = self._unread[:size], self._unread[size:]
        logits = self._reader.read(piece)
        begin: list[AnswerPart] = []
        if not self._has_begun:
            self._has_begun = True
            begin.append(AnswerBegun(len(self._writer.prompt)))
        if self._unread:
            return begin
        parts = self._writer.next_parts(logits)
        self._unread = [part.token for part in parts if isinstance(part, AnswerToken)]
        return [*begin, *parts]

    def _piece_size(self) -> int:
        """How many tokens are read next."""
        tokens_out = len(self._call.tokens_out)
        repeats_steps = self._model.rounds_by_piece and tokens_out <= REPEATED_STEPS_MOST
        prompt_rest = len(self._unread) - tokens_out
        if repeats_steps and tokens_out and self._writer.count == tokens_out:
            return min(self._piece_tokens, prompt_rest) if prompt_rest > 0 else 1
        return self._piece_tokens

    def close(self) -> None:
        """See `EngineConversation.close`."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
