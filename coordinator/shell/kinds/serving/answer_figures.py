"""Figures of a served model's answers: counts and times alone, nothing of a call or its answer.

Buckets are those that OpenTelemetry's conventions advise
(opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics).
"""

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import NamedTuple, TypeVar

from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import AnswerBegun, AnswerRefused, AnswerToken, ModelCall

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = tuple(0.01 * 2**power for power in range(14))
_TOKENS = tuple(float(4**power) for power in range(14))
_RECENT_S = 10
_AnyPart = TypeVar("_AnyPart")


class HistogramSample(NamedTuple):
    """One histogram as it is now."""

    labels: tuple[str, ...]
    buckets: list[tuple[float, int]]
    """Upper bounds, the last one infinite, with the values up to each."""
    sum: float


class Histogram:
    """Values in buckets, by labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def observe(self, value: float, *labels: str) -> None:
        """Count a value."""
        counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def samples(self) -> Iterator[HistogramSample]:
        """A sample for each set of labels."""
        bounds = [*self._bounds, float("inf")]
        for labels, counts in self._counts.items():
            buckets = [*zip(bounds, accumulate(counts), strict=True)]
            yield HistogramSample(labels, buckets, self._sums[labels])


class _AnswerTrace(NamedTuple):
    """What was seen of one answer."""

    prompt_tokens: int = 0
    tokens: int = 0
    first_s: float = 0.0
    newest_s: float = 0.0
    error: str = ""


class RecentRate:
    """How often something happened lately."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque(maxlen=_RECENT_S + 1)
        """Seconds in which it happened, each with how often."""

    def note(self, now_s: float) -> None:
        """It happened once more."""
        second = int(now_s)
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1] = (second, self._counts[-1][1] + 1)
        else:
            self._counts.append((second, 1))

    def per_s(self, now_s: float) -> float:
        """Times a second, in the last whole `_RECENT_S` seconds."""
        end = int(now_s)
        times = sum(count for second, count in self._counts if end - _RECENT_S <= second < end)
        return times / _RECENT_S


class AnswerFigures:
    """Figures of one served model since this process began."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.token_s = Histogram(_TOKEN_S)
        self.request_s = Histogram(_REQUEST_S)
        self.tokens = Histogram(_TOKENS)
        self.recent_tokens = RecentRate()

    async def observe(
        self, call: ModelCall, parts: AsyncGenerator[_AnyPart, None]
    ) -> AsyncGenerator[_AnyPart, None]:
        """The parts of an answer as they come; what was seen of them is counted at the end."""
        began_s = time.monotonic()
        trace = _AnswerTrace(error="cancelled")
        try:
            async with aclosing(parts):
                async for part in parts:
                    trace = _trace_with(trace, part)
                    if isinstance(part, AnswerToken):
                        self.recent_tokens.note(trace.newest_s)
                    yield part
            trace = trace._replace(error="" if trace.error == "cancelled" else trace.error)
        except HyperGPUError as failure:
            trace = trace._replace(error=failure.reason.name.lower())
            raise
        finally:
            self._count("text_completion" if call.messages is None else "chat", trace, began_s)

    def _count(self, operation: str, trace: _AnswerTrace, began_s: float) -> None:
        self.request_s.observe(time.monotonic() - began_s, operation, trace.error)
        if trace.tokens:
            self.first_token_s.observe(trace.first_s - began_s, operation)
            self.tokens.observe(float(trace.prompt_tokens), operation, "input")
            self.tokens.observe(float(trace.tokens), operation, "output")
        if trace.tokens > 1:
            pace_s = (trace.newest_s - trace.first_s) / (trace.tokens - 1)
            self.token_s.observe(pace_s, operation)


def _trace_with(trace: _AnswerTrace, part: object) -> _AnswerTrace:
    match part:
        case AnswerBegun():
            return trace._replace(prompt_tokens=part.prompt_tokens)
        case AnswerToken():
            now_s = time.monotonic()
            first_s = trace.first_s if trace.tokens else now_s
            return trace._replace(tokens=trace.tokens + 1, first_s=first_s, newest_s=now_s)
        case AnswerRefused():
            return trace._replace(error="refused")
        case _:
            return trace
