"""Kind ``map/score``: log-likelihoods of texts, or of continuations of contexts, by transformers.

A text's first token is conditioned on the tokenizer's token of a beginning, or of an end where it
has none. A text beyond the model's length is scored in windows, each conditioned on the last token
before it. ``begin_context = false`` leaves the first token of a context as it is tokenized, as
lm-eval does.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, json_items
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.farm.length_batches import length_batches
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work

_TOKENS_AT_ONCE = 4096
"""Logits of so many tokens are held at once."""
_ITEMS_AT_ONCE = 64
_LENGTH_WITHOUT_LIMIT = 2048
"""Tokens of a window where the model states no limit."""


class ScoredWindow(NamedTuple):
    """Tokens that the model sees at once, the last of which are scored."""

    place: int
    """The item's place in the bundle."""
    tokens: tuple[int, ...]
    scored: int


class WindowScore(NamedTuple):
    """What a window's scored tokens are to the model."""

    log_likelihood: float
    """Sum over the tokens, in nats."""
    is_greedy: bool
    """Whether each of them is the likeliest one at its place."""


class ScoringModel(NamedTuple):
    """A model, and how it sees contexts."""

    model: LanguageModel
    begins_context: bool = True
    """Whether a context begins with the tokenizer's token of a beginning."""


class ItemError(ValueError):
    """An item cannot be done. The text says why."""


def score_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What scores the texts of bundles; it keeps its model from one to the next."""
    models = KeptModel(LanguageModel.load)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        course = BundleCourse(request, callbacks, bundle.items)
        items = json_items(request, bundle)
        course.advance(0)
        model = models.of(request, bundle)
        begins_context = bool(bundle.parameters.get("begin_context", True))
        return _score(request, course, ScoringModel(model, begins_context), items)

    return perform


def _score(
    request: DoWork, course: BundleCourse, scoring: ScoringModel, items: Sequence[TextItem]
) -> WorkOutput:
    windows: list[ScoredWindow] = []
    errors: dict[int, str] = {}
    for place, item in enumerate(items):
        try:
            windows += item_windows(scoring, place, item)
        except ItemError as error:
            errors[place] = str(error)
    sums = [0.0] * len(items)
    greedy = [True] * len(items)
    counts = [0] * len(items)
    lengths = [len(window.tokens) for window in windows]
    open_windows = [0] * len(items)
    for window in windows:
        open_windows[window.place] += 1
    for batch in length_batches(lengths, tokens_most=_TOKENS_AT_ONCE, items_most=_ITEMS_AT_ONCE):
        batch_windows = [windows[number] for number in batch]
        scores = window_scores(scoring.model, batch_windows)
        for window, score in zip(batch_windows, scores, strict=True):
            sums[window.place] += score.log_likelihood
            greedy[window.place] &= score.is_greedy
            counts[window.place] += window.scored
            open_windows[window.place] -= 1
        course.advance(sum(open_windows[window.place] == 0 for window in batch_windows))
    results = [
        ItemResult(error=errors[place])
        if place in errors
        else _result(WindowScore(sums[place], greedy[place]), counts[place])
        for place in range(len(items))
    ]
    tokens = sum(count for count, result in zip(counts, results, strict=True) if not result.error)
    return json_output(request, course, results, tokens)


def _result(score: WindowScore, tokens: int) -> ItemResult:
    if not math.isfinite(score.log_likelihood):
        return ItemResult(error="the log-likelihood is not a finite number")
    return ItemResult(
        {
            "log_likelihood": score.log_likelihood,
            "tokens": tokens,
            "is_greedy": int(score.is_greedy),
        }
    )


def item_windows(scoring: ScoringModel, place: int, item: TextItem) -> list[ScoredWindow]:
    """What the model has to see of an item.

    Raises:
        ItemError: It is no text, or cannot be scored.
    """
    context, continuation = _parts(item)
    model = scoring.model
    tokens, scored_count = _tokens(scoring, context, continuation)
    if scored_count < 1:
        raise ItemError("the text has no token to score")
    length = model.tokens_most or _LENGTH_WITHOUT_LIMIT
    if len(tokens) - 1 <= length:
        return [ScoredWindow(place, tokens, scored_count)]
    if context:
        raise ItemError(
            f"context and continuation are {len(tokens)} tokens; the model takes {length}"
        )
    return [
        ScoredWindow(place, window, len(window) - 1)
        for start in range(0, len(tokens) - 1, length)
        if len(window := tokens[start : start + length + 1]) > 1
    ]


def _parts(item: TextItem) -> tuple[str, str]:
    if item.error:
        raise ItemError(item.error)
    if isinstance(item.value, str):
        return "", item.value
    if isinstance(item.value, dict):
        context, continuation = item.value.get("context"), item.value.get("continuation")
        if isinstance(context, str) and isinstance(continuation, str):
            return context, continuation
    raise ItemError("the item is neither a text nor an object of the texts context, continuation")


def _tokens(scoring: ScoringModel, context: str, continuation: str) -> tuple[tuple[int, ...], int]:
    """All tokens of an item, and how many of the last are scored."""
    model = scoring.model
    encode: Callable[..., Any] = model.tokenizer
    before = encode(context)["input_ids"] if context else []
    tokens = [*encode(context + continuation)["input_ids"]]
    first = model.first_token if scoring.begins_context or not context else None
    if tokens[:1] != [first] and first is not None:
        tokens, before = [first, *tokens], [first, *before]
    begin = max(1, len(before)) if context else 1
    return tuple(tokens), len(tokens) - begin


@torch.inference_mode()
def window_scores(model: LanguageModel, windows: Sequence[ScoredWindow]) -> list[WindowScore]:
    """What the scored tokens of each window are to the model."""
    longest = max(len(window.tokens) for window in windows) - 1
    inputs = torch.zeros((len(windows), longest), dtype=torch.int64)
    targets = torch.zeros((len(windows), longest), dtype=torch.int64)
    mask = torch.zeros((len(windows), longest), dtype=torch.int64)
    is_scored = torch.zeros((len(windows), longest), dtype=torch.bool)
    for row, window in enumerate(windows):
        count = len(window.tokens) - 1
        inputs[row, :count] = torch.tensor(window.tokens[:-1])
        targets[row, :count] = torch.tensor(window.tokens[1:])
        mask[row, :count] = 1
        is_scored[row, count - window.scored : count] = True
    device = model.device
    targets, is_scored = targets.to(device), is_scored.to(device)
    logits = model.model(input_ids=inputs.to(device), attention_mask=mask.to(device)).logits
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
    ).view(targets.shape)  # [windows, longest]
    sums: list[float] = (-(losses * is_scored).double().sum(1)).tolist()
    likeliest: list[bool] = ((logits.argmax(-1) == targets) | ~is_scored).all(1).tolist()
    return [*map(WindowScore, sums, likeliest)]


perform = score_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
