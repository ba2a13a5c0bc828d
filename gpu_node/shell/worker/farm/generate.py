"""Kind ``map/generate``: texts that a causal language model writes, by transformers.

Items are done in groups of ``batch_size`` whose borders lie at fixed places of a chunk, and a
group's random numbers are drawn by the job's seed and the group's first position. So the same item
has the same text wherever bundles are cut, on like hardware: a bundle that ends within a group
does the whole group, and its neighbour does so again.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from transformers import GenerationConfig

from gpu_node.shell.worker.chat_template.renderer import TemplateError, TemplateRenderer
from gpu_node.shell.worker.chat_template.tokenizer_chats import chat_tokens
from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, chunk_items
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work

_RENDERER = TemplateRenderer()
_BATCH_SIZE_MOST = 256
_TOKENS_MOST = 65_536


class WritingRules(NamedTuple):
    """How texts are written."""

    new_tokens_most: int = 128
    temperature: float = 0.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    batch_size: int = 4

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "WritingRules":
        """Those that parameters state.

        Raises:
            ShardError: A value is none that may be.
        """
        try:
            rules = cls(
                int(parameters.get("max_new_tokens", 128)),
                float(parameters.get("temperature", 0.0)),
                float(parameters.get("top_p", 1.0)),
                int(parameters.get("top_k", 0)),
                int(parameters.get("batch_size", 4)),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ShardError(f"a setting of generate is no number: {error}") from error
        is_right = (
            0 < rules.new_tokens_most <= _TOKENS_MOST
            and 0 <= rules.temperature <= 100
            and 0 < rules.top_p <= 1
            and rules.top_k >= 0
            and 0 < rules.batch_size <= _BATCH_SIZE_MOST
        )
        if not is_right:
            raise ShardError(f"settings of generate are out of their ranges: {rules._asdict()}")
        return rules

    def generation(self, end_tokens: Sequence[int]) -> GenerationConfig:
        """The same for transformers."""
        draws: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            draws = {
                "do_sample": True,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
            }
        return GenerationConfig(
            max_new_tokens=self.new_tokens_most,
            eos_token_id=list(end_tokens) or None,
            pad_token_id=end_tokens[0] if end_tokens else 0,
            **draws,
        )


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


def item_groups(request: DoWork, bundle: Bundle, size: int) -> Iterator[list[TextItem]]:
    """Groups of a chunk's items that hold one of the bundle, whole."""
    end = bundle.start + bundle.items
    for chunk in bundle.chunks:
        skipped_items = max(0, bundle.start - chunk.start) // size * size
        whole_groups = -(-(end - chunk.start) // size) * size
        positions = range(chunk.start + skipped_items, chunk.start + whole_groups)
        items = chunk_items(request, bundle, chunk, positions)
        yield from (items[first : first + size] for first in range(0, len(items), size))


def group_seed(seed: int, position: int) -> int:
    """Seed of the group that begins at a position, for torch."""
    content = b"generate" + seed.to_bytes(16, "little", signed=True)
    digest = blake3(content + position.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


@torch.inference_mode()
def write_group(
    model: LanguageModel, rules: WritingRules, seed: int, group: Sequence[TextItem]
) -> dict[int, WrittenItem]:
    """The results of a group by position. Equal arguments give equal texts on one device."""
    written_items: dict[int, WrittenItem] = {}
    prompts: dict[int, list[int]] = {}
    for item in group:
        tokens, error = _prompt_tokens(model, rules, item)
        if error:
            written_items[item.position] = WrittenItem(ItemResult(error=error))
        else:
            prompts[item.position] = tokens
    if prompts:
        torch.manual_seed(group_seed(seed, group[0].position))
        outputs = _continuations(model, rules, [*prompts.values()])
        for (position, prompt), output in zip(prompts.items(), outputs, strict=True):
            text = model.tokenizer.decode(output, skip_special_tokens=True)
            value = {"text": text, "prompt_tokens": len(prompt), "new_tokens": len(output)}
            written_items[position] = WrittenItem(ItemResult(value), len(prompt) + len(output))
    return written_items


def _prompt_tokens(
    model: LanguageModel, rules: WritingRules, item: TextItem
) -> tuple[list[int], str]:
    """The tokens of a prompt, or why there are none."""
    if item.error:
        return [], item.error
    try:
        tokens = _encoded_prompt(model, item.value)
    except TemplateError as error:
        return [], str(error)
    if tokens is None:
        return [], "the item is neither a text nor a list of messages with role and content"
    if not tokens:
        return [], "the prompt has no token"
    most = model.tokens_most
    if most is not None and len(tokens) + rules.new_tokens_most > most:
        new_text = f"{rules.new_tokens_most} new ones"
        return (
            [],
            f"the prompt has {len(tokens)} tokens, and with {new_text} the model takes {most}",
        )
    return tokens, ""


def _encoded_prompt(model: LanguageModel, value: Any) -> list[int] | None:
    if isinstance(value, str):
        return list(model.tokenizer(value)["input_ids"])
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return chat_tokens(_RENDERER, model.tokenizer, value)
    return None


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(each, str) for each in value.values())
    )


def _continuations(
    model: LanguageModel, rules: WritingRules, prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """New tokens of each prompt, without the end's."""
    ends = model.end_tokens
    padding = ends[0] if ends else 0
    longest = max(map(len, prompts))
    inputs = torch.full((len(prompts), longest), padding, dtype=torch.int64)
    mask = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        inputs[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    outputs = model.model.generate(
        input_ids=inputs.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=rules.generation(ends),
    )
    rows: list[list[int]] = outputs[:, longest:].tolist()
    return [[*itertools.takewhile(lambda token: token not in ends, row)] for row in rows]


perform = generate_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
