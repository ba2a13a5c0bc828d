"""Kind ``map/generate``: texts that a causal language model writes, by transformers.

Each token is drawn by the item's seed and the token's place, as of served models. Items are done in
groups of ``batch_size`` whose borders lie at fixed places of a chunk, so that batches round alike.
So the same item has the same text wherever bundles are cut, on like hardware: a bundle that ends
within a group does the whole group, and its neighbour does so again. A bundle with claims is not
written: see `text_judge`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, chunk_items, json_items
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.token_choice import choose_token
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from gpu_node.shell.worker.writing.text_judge import TextJudge, read_claims
from gpu_node.shell.worker.writing.writing_rules import WritingRules, item_seed, prompt_tokens
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.written_texts import WrittenText
from hypergpu.packed_work import unpack_work
from hypergpu.serving.calls import Sampling


class WrittenItem(NamedTuple):
    """The result of one item, with the tokens that it took."""

    result: ItemResult
    tokens: int = 0


def generate_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What writes the texts of bundles; it keeps its model from one to the next."""
    models = KeptModel(LanguageModel.load)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        rules = WritingRules.of(bundle.parameters)
        course = BundleCourse(request, callbacks, bundle.items)
        written_items: dict[int, WrittenItem] = {}
        course.advance(0)
        model = models.of(request, bundle)
        if bundle.claims is not None:
            judge = TextJudge(model, rules, bundle.seed)
            return _judge(request, course, judge, bundle)
        for group in item_groups(request, bundle, rules.batch_size):
            written_items |= write_group(model, rules, bundle.seed, group)
            course.advance(len(group))
        positions = range(bundle.start, bundle.start + bundle.items)
        if not written_items.keys() >= set(positions):
            raise ShardError("the chunks do not hold all items of the bundle")
        bundle_items = [written_items[position] for position in positions]
        tokens = sum(item.tokens for item in bundle_items)
        return json_output(request, course, [item.result for item in bundle_items], tokens)

    return perform


def _judge(request: DoWork, course: BundleCourse, judge: TextJudge, bundle: Bundle) -> WorkOutput:
    """Judge another node's texts of the bundle's items."""
    if bundle.claims is None:
        raise ValueError("there are no claims")
    claims = read_claims(request, bundle.claims, bundle.items)
    results: list[ItemResult] = []
    all_tokens = 0
    for item, claim in zip(json_items(request, bundle), claims, strict=True):
        result, tokens = judge.judge(item, claim)
        results.append(result)
        all_tokens += tokens
        course.advance(1)
    return json_output(request, course, results, all_tokens)


def item_groups(request: DoWork, bundle: Bundle, size: int) -> Iterator[list[TextItem]]:
    """Groups of a chunk's items that hold one of the bundle, whole."""
    end = bundle.start + bundle.items
    for chunk in bundle.chunks:
        skipped_items = max(0, bundle.start - chunk.start) // size * size
        whole_groups = -(-(end - chunk.start) // size) * size
        positions = range(chunk.start + skipped_items, chunk.start + whole_groups)
        items = chunk_items(request, bundle, chunk, positions)
        yield from (items[first : first + size] for first in range(0, len(items), size))


@torch.inference_mode()
def write_group(
    model: LanguageModel, rules: WritingRules, seed: int, group: Sequence[TextItem]
) -> dict[int, WrittenItem]:
    """The results of a group by position. Equal arguments give equal texts on one device."""
    written_items: dict[int, WrittenItem] = {}
    prompts: dict[int, list[int]] = {}
    for item in group:
        tokens, error = prompt_tokens(model, rules, item)
        if error:
            written_items[item.position] = WrittenItem(ItemResult(error=error))
        else:
            prompts[item.position] = tokens
    if prompts:
        samplings = [rules.sampling(item_seed(seed, position)) for position in prompts]
        outputs = _continuations(model, rules, [*prompts.values()], samplings)
        for (position, prompt), output in zip(prompts.items(), outputs, strict=True):
            written_items[position] = _written_item(model, len(prompt), output)
    return written_items


class _Continuation(NamedTuple):
    """New tokens of a prompt, without the end's, and their log-likelihood."""

    tokens: list[int]
    log_likelihood: float


def _written_item(model: LanguageModel, prompt_count: int, output: _Continuation) -> WrittenItem:
    if not math.isfinite(output.log_likelihood):
        return WrittenItem(ItemResult(error="the log-likelihood is not a finite number"))
    value = WrittenText(
        text=model.tokenizer.decode(output.tokens, skip_special_tokens=True),
        prompt_tokens=prompt_count,
        new_tokens=len(output.tokens),
        token_ids=tuple(output.tokens),
        log_likelihood=output.log_likelihood,
    )
    return WrittenItem(ItemResult(msgspec.to_builtins(value)), prompt_count + len(output.tokens))


class _SeededDraw(LogitsProcessor):  # type: ignore[misc]  # it is typed loosely
    """Leaves each row the token that its seed draws, and keeps how likely that was."""

    def __init__(self, samplings: Sequence[Sampling], prompt_length: int, ends: set[int]) -> None:
        self._samplings = samplings
        self._prompt_length = prompt_length
        self._ends = ends
        self.log_likelihoods: list[torch.Tensor] = []
        """float64[rows] of each new token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`: int64[rows, tokens], float32[rows, vocabulary]."""
        position = input_ids.shape[1] - self._prompt_length
        if self._samplings[0].temperature == 0:
            tokens = scores.argmax(-1)
        else:
            last = input_ids[:, -1].tolist() if position else [None] * len(scores)
            chosen_tokens = [
                before if before in self._ends else choose_token(row, rules, position).token
                for row, rules, before in zip(scores, self._samplings, last, strict=True)
            ]
            tokens = torch.tensor(chosen_tokens, device=scores.device)
        column = tokens[:, None]
        likelihoods = scores.gather(1, column)[:, 0] - torch.logsumexp(scores, -1)
        self.log_likelihoods.append(likelihoods.cpu().double())
        return torch.full_like(scores, -math.inf).scatter_(1, column, 0.0)


def _continuations(
    model: LanguageModel,
    rules: WritingRules,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
) -> list[_Continuation]:
    ends = model.end_tokens
    padding = ends[0] if ends else 0
    longest = max(map(len, prompts))
    inputs = torch.full((len(prompts), longest), padding, dtype=torch.int64)
    mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        inputs[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    draw = _SeededDraw(samplings, longest, set(ends))
    outputs: Any = model.model.generate(
        input_ids=inputs.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=rules.generation(ends),
        logits_processor=LogitsProcessorList([draw]),
    )
    likelihoods = torch.stack(draw.log_likelihoods, 1)  # [rows, new tokens]
    rows: list[list[int]] = outputs[:, longest:].tolist()
    texts = [[*itertools.takewhile(lambda token: token not in ends, row)] for row in rows]
    return [
        _Continuation(tokens, float(likelihoods[row, : len(tokens)].sum()))
        for row, tokens in enumerate(texts)
    ]


perform = generate_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
