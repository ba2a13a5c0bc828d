"""One call that is being answered: its prompt is read in pieces, then token follows token.

A conversation is computed by itself, whatever else the model answers at the time: so an answer
depends on its call alone, and another replica that goes on with it computes the same numbers but
for the order of sums.
"""

import torch

from gpu_node.shell.worker.serving.answer_text import AnswerText
from gpu_node.shell.worker.serving.engine import (
    CallTooLongError,
    TokenModel,
    TokenReader,
    UnanswerableCallError,
)
from gpu_node.shell.worker.serving.token_choice import TokenChoice, choose_token
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    LikelyToken,
    ModelCall,
)

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
        prompt = prompt_tokens(model, call)
        new_tokens = call.new_tokens_most
        room = tokens_most - len(prompt)
        if room < 1 or (new_tokens is not None and new_tokens > room):
            more = f", and {new_tokens} new ones are asked for" if new_tokens else ""
            detail = f"the prompt has {len(prompt)} tokens{more}"
            raise CallTooLongError(f"{detail}; this model takes {tokens_most} in all")
        self._new_tokens_most = new_tokens or room
        self._prompt_tokens = len(prompt)
        self._unread = [*prompt, *call.tokens_out]
        self._count = len(call.tokens_out)
        """Tokens of the answer so far."""
        self._has_begun = False
        self._text = AnswerText(model.decode, prompt, call.stops)
        for token in call.tokens_out:
            self._text.add(token)
        self.tokens_most = max(len(prompt) + self._new_tokens_most, len(self._unread))
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
            begin.append(AnswerBegun(self._prompt_tokens))
        if self._unread:
            return begin
        return [*begin, *self._next_parts(logits)]

    def _piece_size(self) -> int:
        """How many tokens are read next."""
        tokens_out = len(self._call.tokens_out)
        repeats_steps = self._model.rounds_by_piece and tokens_out <= REPEATED_STEPS_MOST
        prompt_rest = len(self._unread) - tokens_out
        if repeats_steps and tokens_out and self._count == tokens_out:
            return min(self._piece_tokens, prompt_rest) if prompt_rest > 0 else 1
        return self._piece_tokens

    def close(self) -> None:
        """See `EngineConversation.close`."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _next_parts(self, logits: torch.Tensor) -> list[AnswerPart]:
        if self._count >= self._new_tokens_most:
            # Everything was out before the replica that answered was lost.
            return [AnswerEnded("length", self._text.end())]
        call = self._call
        choice = choose_token(logits, call.sampling, self._count, call.top_tokens)
        if choice.token in self._model.end_tokens:
            return [AnswerEnded("stop", self._text.end())]
        self._count += 1
        text = self._text.add(choice.token)
        part = self._token_part(choice, text)
        is_full = self._count >= self._new_tokens_most
        rest = self._text.end() if is_full and not self._text.is_stopped else ""
        # A stop may also lie in what was held back.
        if self._text.is_stopped or is_full:
            return [part, AnswerEnded("stop" if self._text.is_stopped else "length", rest)]
        self._unread = [choice.token]
        return [part]

    def _token_part(self, choice: TokenChoice, text: str) -> AnswerToken:
        if self._call.top_tokens is None:
            return AnswerToken(choice.token, text)
        decode = self._model.decode
        likely = tuple(LikelyToken(token, decode([token]), value) for token, value in choice.likely)
        return AnswerToken(choice.token, text, choice.log_probability, likely)


def prompt_tokens(model: TokenModel, call: ModelCall) -> list[int]:
    """The tokens of a call's prompt.

    Raises:
        UnanswerableCallError: It has none, or the chat template refuses it.
    """
    tokens = _tokens_of(model, call)
    if not tokens:
        raise UnanswerableCallError("the prompt has no token")
    if max(tokens) >= model.vocabulary:
        detail = f"token {max(tokens)} is none of the model's {model.vocabulary}"
        raise UnanswerableCallError(detail)
    return tokens


def _tokens_of(model: TokenModel, call: ModelCall) -> list[int]:
    if call.tokens is not None:
        return list(call.tokens)
    if call.text is not None:
        return model.encode(call.text)
    return model.encode_chat(call.messages or (), call.tools)
