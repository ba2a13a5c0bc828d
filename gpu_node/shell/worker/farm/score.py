"""Kind ``map/score``: log-likelihoods of texts, or of continuations of contexts, by transformers.

A text's first token is conditioned on the tokenizer's token of a beginning, or of an end where it
has none. A text beyond the model's length is scored in windows, each conditioned on the last token
before it.
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
        return _score(request, course, models.of(request, bundle), items)

    return perform


def _score(
    request: DoWork, course: BundleCourse, model: LanguageModel, items: Sequence[TextItem]
) -> WorkOutput:
    windows: list[ScoredWindow] = []
    errors: dict[int, str] = {}
    for place, item in enumerate(items):
        try:
            windows += item_windows(model, place, item)
        except ItemError as error:
            errors[place] = str(error)
    sums = [0.0] * len(items)
    counts = [0] * len(items)
    lengths = [len(window.tokens) for window in windows]
    open_windows = [0] * len(items)
    for window in windows:
        open_windows[window.place] += 1
    for batch in length_batches(lengths, tokens_most=_TOKENS_AT_ONCE, items_most=_ITEMS_AT_ONCE):
        batch_windows = [windows[number] for number in batch]
        for window, value in zip(batch_windows, window_scores(model, batch_windows), strict=True):
            sums[window.place] += value
            counts[window.place] += window.scored
            open_windows[window.place] -= 1
        course.advance(sum(open_windows[window.place] == 0 for window in batch_windows))
    results = [
        ItemResult(error=errors[place]) if place in errors else _result(sums[place], counts[place])
        for place in range(len(items))
    ]
    tokens = sum(count for count, result in zip(counts, results, strict=True) if not result.error)
    return json_output(request, course, results, tokens)


def _result(log_likelihood: float, tokens: int) -> ItemResult:
    if not math.isfinite(log_likelihood):
        return ItemResult(error="the log-likelihood is not a finite number")
    return ItemResult({"log_likelihood": log_likelihood, "tokens": tokens})


def item_windows(model: LanguageModel, place: int, item: TextItem) -> list[ScoredWindow]:
    """What the model has to see of an item.

    Raises:
        ItemError: It is no text, or cannot be scored.
    """
    context, continuation = _parts(item)
    tokens, scored_count = _tokens(model, context, continuation)
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


def _tokens(model: LanguageModel, context: str, continuation: str) -> tuple[tuple[int, ...], int]:
    """All tokens of an item, and how many of the last are scored."""
    encode: Callable[..., Any] = model.tokenizer
    before = encode(context)["input_ids"] if context else []
    tokens = [*encode(context + continuation)["input_ids"]]
    first = model.first_token
    if tokens[:1] != [first] and first is not None:
        tokens, before = [first, *tokens], [first, *before]
    begin = max(1, len(before)) if context else 1
    return tuple(tokens), len(tokens) - begin


@torch.inference_mode()
def window_scores(model: LanguageModel, windows: Sequence[ScoredWindow]) -> list[float]:
    """Sum of the log-likelihoods of each window's scored tokens, in nats."""
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
    logits = model.model(input_ids=inputs.to(device), attention_mask=mask.to(device)).logits
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten().to(device), reduction="none"
    ).view(targets.shape)  # [windows, longest]
    values: list[float] = (-(losses * is_scored.to(device)).double().sum(1)).tolist()
    return values


perform = score_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
