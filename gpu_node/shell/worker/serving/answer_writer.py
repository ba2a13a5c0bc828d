"""Makes an answer of logits: draws, stops, limits and the text, whatever computed them."""

import torch

from gpu_node.shell.worker.serving.answer_text import AnswerText
from gpu_node.shell.worker.serving.engine import (
    CallTooLongError,
    TextModel,
    UnanswerableCallError,
)
from gpu_node.shell.worker.serving.token_choice import TokenChoice, choose_token
from hypergpu.serving.calls import (
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    LikelyToken,
    ModelCall,
)


class AnswerWriter:
    """The answer to one call, token by token.

    Args:
        model: Knows the tokens.
        call: Checked; its tokens that are out are not told again.
        tokens_most: Tokens of prompt and answer at most.

    Raises:
        UnanswerableCallError: The prompt cannot be read, or leaves no room for an answer.
    """

    def __init__(self, model: TextModel, call: ModelCall, tokens_most: int) -> None:
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
        self.prompt = tuple(prompt)
        """Tokens of the prompt."""
        self.count = len(call.tokens_out)
        """Tokens of the answer so far."""
        self._text = AnswerText(model.decode, prompt, call.stops)
        for token in call.tokens_out:
            self._text.add(token)
        self.tokens_most = len(prompt) + max(self._new_tokens_most, self.count)
        """Tokens of its prompt and answer at most."""

    def next_parts(self, logits: torch.Tensor) -> list[AnswerPart]:
        """What follows from the logits behind the newest token, ``float[vocabulary]``."""
        if self.count >= self._new_tokens_most:
            # Everything was out before the replica that answered was lost.
            return [AnswerEnded("length", self._text.end())]
        call = self._call
        choice = choose_token(logits, call.sampling, self.count, call.top_tokens)
        if choice.token in self._model.end_tokens:
            return [AnswerEnded("stop", self._text.end())]
        self.count += 1
        text = self._text.add(choice.token)
        part = self._token_part(choice, text)
        is_full = self.count >= self._new_tokens_most
        rest = self._text.end() if is_full and not self._text.is_stopped else ""
        # A stop may also lie in what was held back.
        if self._text.is_stopped or is_full:
            return [part, AnswerEnded("stop" if self._text.is_stopped else "length", rest)]
        return [part]

    def _token_part(self, choice: TokenChoice, text: str) -> AnswerToken:
        if self._call.top_tokens is None:
            return AnswerToken(choice.token, text)
        decode = self._model.decode
        likely = tuple(LikelyToken(token, decode([token]), value) for token, value in choice.likely)
        return AnswerToken(choice.token, text, choice.log_probability, likely)


def prompt_tokens(model: TextModel, call: ModelCall) -> list[int]:
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


def _tokens_of(model: TextModel, call: ModelCall) -> list[int]:
    if call.tokens is not None:
        return list(call.tokens)
    if call.text is not None:
        return model.encode(call.text)
    return model.encode_chat(call.messages or (), call.tools)
