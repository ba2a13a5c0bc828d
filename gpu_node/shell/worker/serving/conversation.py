"""One call that is being answered: its prompt is read in pieces, then token follows token.

A conversation is computed by itself, whatever else the model answers at the time: so an answer
depends on its call alone, and another replica that goes on with it computes the same numbers but
for the order of sums.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.answer_text import AnswerText
from gpu_node.shell.worker.serving.token_choice import TokenChoice, choose_token
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    CheckResult,
    LikelyToken,
    ModelCall,
)

PIECE_TOKENS = 512


class UnanswerableCallError(Exception):
    """The model cannot answer the call. The text says why."""

    is_too_long = False


class CallTooLongError(UnanswerableCallError):
    """Its prompt leaves no room for the answer."""

    is_too_long = True


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
    """

    def __init__(
        self,
        model: LanguageModel,
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
        self._cache = DynamicCache(config=model.model.config)
        self._count = len(call.tokens_out)
        """Tokens of the answer so far."""
        self._has_begun = False
        self._ends = frozenset(model.end_tokens)
        self._text = AnswerText(model.tokenizer, prompt, call.stops)
        for token in call.tokens_out:
            self._text.add(token)

    @torch.inference_mode()
    def step(self) -> list[AnswerPart]:
        """Read a piece of the prompt, or add a token; the last parts are of `is_last`."""
        piece, self._unread = self._unread[: self._piece_tokens], self._unread[self._piece_tokens :]
        inputs = torch.tensor([piece], device=self._model.device)
        output: Any = self._model.model(
            input_ids=inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        begin: list[AnswerPart] = []
        if not self._has_begun:
            self._has_begun = True
            begin.append(AnswerBegun(self._prompt_tokens))
        if self._unread:
            return begin
        return [*begin, *self._next_parts(output.logits[0, -1])]

    def _next_parts(self, logits: torch.Tensor) -> list[AnswerPart]:
        if self._count >= self._new_tokens_most:
            # Everything was out before the replica that answered was lost.
            return [AnswerEnded("length", self._text.end())]
        call = self._call
        choice = choose_token(logits, call.sampling, self._count, call.top_tokens or 0)
        if choice.token in self._ends:
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
        decode = self._model.tokenizer.decode
        likely = tuple(LikelyToken(token, decode([token]), value) for token, value in choice.likely)
        return AnswerToken(choice.token, text, choice.log_probability, likely)


def is_last(parts: Sequence[AnswerPart]) -> bool:
    """Whether the answer is over with these parts."""
    return bool(parts) and isinstance(parts[-1], AnswerEnded | AnswerRefused | CheckResult)


def prompt_tokens(model: LanguageModel, call: ModelCall) -> list[int]:
    """The tokens of a call's prompt.

    Raises:
        UnanswerableCallError: It has none, or the chat template refuses it.
    """
    vocabulary = model.model.get_input_embeddings().num_embeddings
    tokens = _tokens_of(model, call)
    if not tokens:
        raise UnanswerableCallError("the prompt has no token")
    if max(tokens) >= vocabulary:
        detail = f"token {max(tokens)} is none of the model's {vocabulary}"
        raise UnanswerableCallError(detail)
    return tokens


def _tokens_of(model: LanguageModel, call: ModelCall) -> list[int]:
    tokenizer = model.tokenizer
    if call.tokens is not None:
        return list(call.tokens)
    if call.text is not None:
        return list(tokenizer(call.text)["input_ids"])
    if not tokenizer.chat_template:
        raise UnanswerableCallError(
            "the model has no chat template, so it takes no messages. Fix: send a plain prompt"
            " (/v1/completions), or serve a model that was made for chats"
        )
    messages = [dict(message) for message in call.messages or ()]
    tools = [dict(tool) for tool in call.tools] or None
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        detail = f"the chat template refuses the messages: {type(error).__name__}: {error}"
        raise UnanswerableCallError(detail[:500]) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
