"""Counts the tokens of a ring for each of its stages: by its layers."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.shell.kinds.serving.token_counter import (
    CountedPart,
    CountWindow,
    ReportCount,
    TokenCounter,
    UnitTally,
)
from hypergpu.ids import NodeId
from hypergpu.serving.calls import ModelCall


class CountedStage(NamedTuple):
    """A stage that signs counts."""

    node: NodeId
    lease: int
    part: CountedPart
    """What of the ring's tokens is counted for it."""


class RingCounter:
    """Tokens of a ring, for each stage that is there now.

    A token of a ring is counted once in each layer: the parts of its stages add up to the whole
    at most.

    Args:
        report: Has a window's count decided on.
        tally: Has what is counted added.
    """

    def __init__(self, report: ReportCount, tally: UnitTally) -> None:
        self._report = report
        self._tally = tally
        self._counters: dict[CountedStage, TokenCounter] = {}
        self._calls: dict[int, ModelCall] = {}
        """Calls that are open, with the tokens that are out."""

    def review(self, stages: Iterable[CountedStage]) -> None:
        """End windows of stages that are gone, and begin those of new ones."""
        present_stages = frozenset(stages)
        for stage in self._counters.keys() - present_stages:
            self._counters.pop(stage).close()
        for stage in present_stages - self._counters.keys():
            begin_window = partial(CountWindow, stage.node, stage.lease, self._report, stage.part)
            counter = TokenCounter(begin_window, lambda _: None, self._tally)
            self._counters[stage] = counter
            for number, call in self._calls.items():
                counter.begin(number, call)

    @property
    def counters(self) -> Mapping[CountedStage, TokenCounter]:
        """Counters of the stages that are there."""
        return self._counters

    def window_of(self, node: NodeId) -> CountWindow | None:
        """The window in which a stage's tokens are counted now; None: it signs no counts."""
        counters = self._counters.items()
        return next((each.window for stage, each in counters if stage.node == node), None)

    def _each(self, tell: Callable[[TokenCounter], None]) -> None:
        # A window that ends may be reported at once.
        for counter in [*self._counters.values()]:
            tell(counter)

    def begin(self, number: int, call: ModelCall) -> None:
        """See `AnswerCounter.begin`."""
        self._calls[number] = call
        self._each(lambda counter: counter.begin(number, call))

    def add_read(self, number: int, prompt_tokens: int) -> None:
        """See `AnswerCounter.add_read`."""
        self._each(lambda counter: counter.add_read(number, prompt_tokens))

    def add_token(self, number: int, token: int) -> None:
        """See `AnswerCounter.add_token`."""
        call = self._calls[number]
        self._calls[number] = replace(call, tokens_out=(*call.tokens_out, token))
        self._each(lambda counter: counter.add_token(number, token))

    def end(self, number: int, *, has_ended: bool = False) -> None:
        """See `AnswerCounter.end`."""
        self._calls.pop(number, None)
        self._each(lambda counter: counter.end(number, has_ended=has_ended))

    def close(self) -> None:
        """See `AnswerCounter.close`."""
        self._each(lambda counter: counter.close())
