"""Answers as OpenAI's API has them, whole and in pieces."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypergpu.serving.calls import AnswerBegun, AnswerEnded, AnswerPart, AnswerToken
from hypergpu.user.client.models import AnswerRoute


class AnswerForm(NamedTuple):
    """What all pieces of one answer have in common."""

    id: str
    model: str
    created_unix_s: int
    is_chat: bool

    @classmethod
    def begin(cls, answer_id: str, model: str, *, is_chat: bool) -> "AnswerForm":
        """The form of an answer that begins now."""
        return cls(answer_id, model, int(time.time()), is_chat)

    def body(self, kind: str, choices: list[dict[str, Any]], fingerprint: str) -> dict[str, Any]:
        """An object of the API."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": fingerprint or None,
            "choices": choices,
        }

    @property
    def whole_kind(self) -> str:
        """Name of a whole answer."""
        return "chat.completion" if self.is_chat else "text_completion"

    @property
    def piece_kind(self) -> str:
        """Name of a piece of an answer."""
        return "chat.completion.chunk" if self.is_chat else "text_completion"


class ChoiceText:
    """One choice as it grows."""

    def __init__(self, index: int, prompt: int = 0) -> None:
        self.index = index
        self.prompt = prompt
        """Number of the prompt that it answers, of those of the request."""
        self.text = ""
        self.finish: str | None = None
        self.prompt_tokens = 0
        self.held_tokens = 0
        """Tokens of the prompt that the replica had read for a call before."""
        self.tokens: list[AnswerToken] = []
        self.fingerprint = ""
        self.routes: list[AnswerRoute] = []

    def note(self, part: AnswerRoute | AnswerPart) -> str:
        """Take a part in; gives the text that it adds."""
        match part:
            case AnswerRoute():
                self.routes.append(part)
                self.fingerprint = part.fingerprint
            case AnswerBegun():
                self.prompt_tokens, self.held_tokens = part.prompt_tokens, part.held_tokens
            case AnswerToken():
                self.tokens.append(part)
                self.text += part.text
                return part.text
            case AnswerEnded():
                self.finish = part.finish
                self.text += part.text
                return part.text
            case _:
                pass
        return ""


def usage_of(choices: Sequence[ChoiceText]) -> dict[str, Any]:
    """Tokens that an answer used. A prompt that is answered several times counts once."""
    held_tokens = sum({choice.prompt: choice.held_tokens for choice in choices}.values())
    new_tokens = sum(len(choice.tokens) for choice in choices)
    prompt_tokens = sum({choice.prompt: choice.prompt_tokens for choice in choices}.values())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": held_tokens},
    }


def whole_answer(form: AnswerForm, choices: Sequence[ChoiceText]) -> dict[str, Any]:
    """A whole answer."""
    choose = _chat_choice if form.is_chat else _text_choice
    fingerprint = choices[0].fingerprint if choices else ""
    body = form.body(form.whole_kind, [choose(choice) for choice in choices], fingerprint)
    return {**body, "usage": usage_of(choices)}


def _chat_choice(choice: ChoiceText) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _chat_log_probabilities(choice.tokens),
        "finish_reason": choice.finish,
    }


def _text_choice(choice: ChoiceText) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": _text_log_probabilities(choice.tokens),
        "finish_reason": choice.finish,
    }


def first_piece(form: AnswerForm, choice: ChoiceText) -> dict[str, Any] | None:
    """What a stream of a choice begins with; None: nothing."""
    return _piece(form, choice, {"role": "assistant", "content": ""}) if form.is_chat else None


def piece(form: AnswerForm, choice: ChoiceText, text: str, part: AnswerPart) -> dict[str, Any]:
    """The piece of a stream for a part of an answer."""
    tokens = [part] if isinstance(part, AnswerToken) else []
    if form.is_chat:
        delta = {"content": text} if text else {}
        return _piece(form, choice, delta, _chat_log_probabilities(tokens))
    return form.body(
        form.piece_kind,
        [
            {
                "index": choice.index,
                "text": text,
                "logprobs": _text_log_probabilities(tokens),
                "finish_reason": choice.finish,
            }
        ],
        choice.fingerprint,
    )


def _piece(
    form: AnswerForm,
    choice: ChoiceText,
    delta: dict[str, Any],
    log_probabilities: dict[str, Any] | None = None,
) -> dict[str, Any]:
    entry = {
        "index": choice.index,
        "delta": delta,
        "logprobs": log_probabilities,
        "finish_reason": choice.finish,
    }
    return form.body(form.piece_kind, [entry], choice.fingerprint)


def usage_piece(form: AnswerForm, choices: Sequence[ChoiceText]) -> dict[str, Any]:
    """The last piece of a stream that was asked for its usage."""
    return {**form.body(form.piece_kind, [], ""), "usage": usage_of(choices)}


def _chat_log_probabilities(tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
    told_tokens = [token for token in tokens if token.log_probability is not None]
    if not told_tokens:
        return None
    return {
        "content": [
            {
                **_token(token.text, token.log_probability),
                "top_logprobs": [
                    _token(likely.text, likely.log_probability) for likely in token.likely
                ],
            }
            for token in told_tokens
        ],
        "refusal": None,
    }


def _token(text: str, log_probability: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_probability, "bytes": list(text.encode())}


def _text_log_probabilities(tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
    told_tokens = [token for token in tokens if token.log_probability is not None]
    if not told_tokens:
        return None
    offsets, length = [], 0
    for token in told_tokens:
        offsets.append(length)
        length += len(token.text)
    return {
        "tokens": [token.text for token in told_tokens],
        "token_logprobs": [token.log_probability for token in told_tokens],
        "top_logprobs": [
            {likely.text: likely.log_probability for likely in token.likely}
            for token in told_tokens
        ],
        "text_offset": offsets,
    }
