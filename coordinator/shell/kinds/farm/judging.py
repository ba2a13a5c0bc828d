"""Whether a judge upholds written texts, and whether two judges say the same.

A claim is upheld where its margins are those of rounding, and the judge's log-likelihood is that of
the node that wrote the text: the first finds texts of another model or sampling, the second whoever
judges without reading. The limits are measured between types, devices and batches: docs/log.md.
"""

import math
from collections.abc import Sequence
from itertools import starmap

from coordinator.shell.kinds.farm.comparison import ComparedResult
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.written_texts import (
    TextJudgement,
    WrittenText,
    claim_lines,
    judged_value,
    written_value,
)
from hypergpu.serving.calls import MARGIN_MOST

_ALLOWANCE = 15_000
"""Margin that a token may have on average, as of served answers."""
_EXCESS_MOST, _EXCESS_OF_TOKEN = 1_500_000, 30_000
"""Margin above the allowance: of a long run of tokens, and of each token of a short one."""
_EXCESS_LEAST = 100_000
_NATS_OF_TOKEN, _NATS_LEAST = 0.02, 0.25
"""By so much two log-likelihoods may differ, for each token and beside that."""


def claims_in(result: ComparedResult) -> bytes:
    """What a judge is told of a part of a result.

    Raises:
        HyperGPUError: REQUEST_INVALID, the result is malformed.
    """
    return claim_lines(result.lines)


class _Limits:
    """What honest judges may differ by over some tokens."""

    def __init__(self, tokens: int) -> None:
        excess = max(_EXCESS_LEAST, min(_EXCESS_MOST, _EXCESS_OF_TOKEN * tokens))
        self.margin = _ALLOWANCE * tokens + excess
        self.nats = _NATS_LEAST + _NATS_OF_TOKEN * tokens


def are_upheld(written: Sequence[ItemResult], judged: Sequence[ItemResult]) -> bool:
    """Whether a judge upholds the texts of some items, each and all together.

    Raises:
        HyperGPUError: REQUEST_INVALID, a result is malformed.
    """
    if not _have_like_errors(written, judged):
        return False
    pairs = [
        (written_value(one), judged_value(other))
        for one, other in zip(written, judged, strict=True)
        if not one.error
    ]
    margin = sum(judgement.margin for _, judgement in pairs)
    tokens = sum(_scored_tokens(text) for text, _ in pairs)
    return margin <= _Limits(tokens).margin and all(starmap(_is_upheld, pairs))


def _scored_tokens(text: WrittenText) -> int:
    """Its tokens, and its end, which most texts have."""
    return len(text.token_ids) + 1


def _is_upheld(text: WrittenText, judgement: TextJudgement) -> bool:
    tokens = _scored_tokens(text)
    limits = _Limits(tokens)
    return (
        judgement.tokens == text.prompt_tokens + text.new_tokens
        and 0 <= judgement.margin <= min(limits.margin, tokens * MARGIN_MOST)
        and _are_near(text.log_likelihood, judgement.log_likelihood, limits.nats)
    )


def are_judged_alike(one: Sequence[ItemResult], other: Sequence[ItemResult]) -> bool:
    """Whether two judges say the same of the texts of some items.

    Raises:
        HyperGPUError: REQUEST_INVALID, a result is malformed.
    """
    if not _have_like_errors(one, other):
        return False
    return all(
        _is_judged_alike(judged_value(first), judged_value(second))
        for first, second in zip(one, other, strict=True)
        if not first.error
    )


def _is_judged_alike(one: TextJudgement, other: TextJudgement) -> bool:
    # Of tokens that no model gives margins are large, and differ by what rounding makes of them.
    limits = _Limits(one.tokens)
    is_near = abs(one.margin - other.margin) <= max(limits.margin, one.margin // 4)
    return (
        one.tokens == other.tokens
        and is_near
        and _are_near(one.log_likelihood, other.log_likelihood, limits.nats)
    )


def _are_near(one: float, other: float, nats: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= nats


def _have_like_errors(one: Sequence[ItemResult], other: Sequence[ItemResult]) -> bool:
    """Whether the same items have a reason in place of a value, whatever it says."""
    return [bool(each.error) for each in one] == [bool(each.error) for each in other]
