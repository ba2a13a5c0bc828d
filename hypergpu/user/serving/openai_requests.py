"""Requests as OpenAI's API has them, and the calls that they become.

Fields that would change an answer and that nobody here can follow are refused, never left out in
silence; the rest of what tools send along is passed over.
"""

from typing import Any, NoReturn, Self

import msgspec

from hypergpu.serving.calls import (
    SEED_MOST,
    STOPS_MOST,
    TOP_TOKENS_MOST,
    UNSTATED_SEED,
    ModelCall,
    Sampling,
)

_TEMPERATURE_USUAL = 1.0
_COMPLETION_TOKENS_USUAL = 16
"""As of OpenAI's older call."""
_CHOICES_MOST = 16


class ApiError(Exception):
    """A request that is not answered, as OpenAI's errors are: status, kind, field and code."""

    def __init__(
        self,
        message: str,
        *,
        fix: str = "",
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(f"{message}. Fix: {fix}" if fix else message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.wait_s = 0
        """Seconds after which the same may be asked again; 0: nobody knows."""

    def after(self, wait_s: int) -> Self:
        """The same error, with the seconds after which the same may be asked again."""
        self.wait_s = wait_s
        return self

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        return {"retry-after": str(self.wait_s)} if self.wait_s else {}

    def body(self) -> dict[str, Any]:
        """The answer's body."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has beside its tokens."""

    include_usage: bool = False


class _AnyRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def choices(self) -> int:
        """Answers that are asked for."""
        return 1 if self.n is None else self.n

    @property
    def has_stream(self) -> bool:
        """Whether parts are sent as they come."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the tokens that were used."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int) -> Sampling:
        """How tokens of a choice are drawn."""
        if self.seed is None:
            seed = UNSTATED_SEED
        elif not 0 <= self.seed + choice <= SEED_MOST:
            _refuse("seed", f"a whole number from 0 to {SEED_MOST}")
        else:
            seed = self.seed + choice
        temperature = _TEMPERATURE_USUAL if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        # OpenAI's tools send 0 where they mean the likeliest token.
        is_greedy = top_p == 0
        return Sampling(
            temperature=0.0 if is_greedy else temperature,
            top_p=1.0 if is_greedy else top_p,
            top_k=self.top_k or 0,
            seed=seed,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which an answer ends."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > STOPS_MOST:
            _refuse("stop", f"{STOPS_MOST} texts at most")
        return tuple(stop for stop in stops if stop)

    def check_common(self) -> None:
        """Refuse what changes an answer and is not there.

        Raises:
            ApiError: With the field.
        """
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                _refuse(name, "0: penalties are not there")
        if self.logit_bias:
            _refuse("logit_bias", "left out: biases are not there")
        if not 0 < self.choices <= _CHOICES_MOST:
            _refuse("n", f"1 to {_CHOICES_MOST}")


class ChatRequest(_AnyRequest, frozen=True, kw_only=True):
    """A chat that a model is to go on with."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    def calls(self) -> list[ModelCall]:
        """A call for each choice.

        Raises:
            ApiError: A field is not right.
        """
        self.check_common()
        if self.tool_choice not in {None, "auto", "none"}:
            _refuse("tool_choice", "auto or none: a model is not made to call a tool")
        if self.response_format and self.response_format.get("type") != "text":
            _refuse("response_format", "text: answers are not bound to a schema")
        messages = tuple(map(_plain_message, self.messages))
        tools = () if self.tool_choice == "none" else tuple(self.tools or ())
        return [
            ModelCall(
                messages=messages,
                tools=tools,
                sampling=self.sampling(choice),
                new_tokens_most=self.max_completion_tokens or self.max_tokens,
                stops=self.stops,
                top_tokens=self._top_tokens,
            )
            for choice in range(self.choices)
        ]

    @property
    def _top_tokens(self) -> int | None:
        if not self.logprobs:
            return None
        top_tokens = self.top_logprobs or 0
        if not 0 <= top_tokens <= TOP_TOKENS_MOST:
            _refuse("top_logprobs", f"0 to {TOP_TOKENS_MOST}")
        return top_tokens


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a text, as chat templates take it."""
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        _refuse("messages", "objects with a role")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        _refuse("messages", "objects whose content is a text")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            _refuse("messages", "texts alone: pictures and sounds are not read")
        texts.append(str(part.get("text", "")))
    return {**message, "content": "".join(texts)}


class CompletionRequest(_AnyRequest, frozen=True, kw_only=True):
    """Texts that a model is to go on with."""

    prompt: str | list[Any]
    """A text, its tokens, or several of either."""
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def calls(self) -> list[ModelCall]:
        """A call for each choice of each prompt, in order.

        Raises:
            ApiError: A field is not right.
        """
        self.check_common()
        for name in ("echo", "suffix"):
            if getattr(self, name):
                _refuse(name, "left out: it is not there")
        if self.best_of not in {None, 1, self.choices}:
            _refuse("best_of", "left out: it is not there")
        if self.logprobs is not None and not 0 <= self.logprobs <= TOP_TOKENS_MOST:
            _refuse("logprobs", f"0 to {TOP_TOKENS_MOST}")
        prompts = self._prompts()
        if not 0 < len(prompts) * self.choices <= _CHOICES_MOST:
            _refuse("prompt", f"1 to {_CHOICES_MOST} prompts in a request")
        return [
            ModelCall(
                text=prompt if isinstance(prompt, str) else None,
                tokens=None if isinstance(prompt, str) else tuple(prompt),
                sampling=self.sampling(choice),
                new_tokens_most=self.max_tokens or _COMPLETION_TOKENS_USUAL,
                stops=self.stops,
                top_tokens=self.logprobs,
            )
            for prompt in prompts
            for choice in range(self.choices)
        ]

    def _prompts(self) -> list[str | list[int]]:
        prompts: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and all(map(_is_token, prompts)):
            return [prompts]
        for prompt in prompts:
            is_tokens = isinstance(prompt, list) and prompt and all(map(_is_token, prompt))
            if not (isinstance(prompt, str) or is_tokens):
                _refuse("prompt", "a text, a list of its tokens, or several of either")
        return prompts


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(param: str, rule: str) -> NoReturn:
    raise ApiError(f"{param} must be {rule}", fix=f"change {param}", param=param)
