"""How texts of farm jobs are written: settings, prompts, and the seed of each item."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blake3 import blake3
from transformers import GenerationConfig

from gpu_node.shell.worker.chat_template.renderer import TemplateError, TemplateRenderer
from gpu_node.shell.worker.chat_template.tokenizer_chats import chat_tokens
from gpu_node.shell.worker.farm.chunk_items import TextItem
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.farm.written_texts import TOKENS_MOST
from hypergpu.serving.calls import SEED_MOST, Sampling

_RENDERER = TemplateRenderer()
_BATCH_SIZE_MOST = 256


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
            0 < rules.new_tokens_most <= TOKENS_MOST
            and 0 <= rules.temperature <= 100
            and 0 < rules.top_p <= 1
            and rules.top_k >= 0
            and 0 < rules.batch_size <= _BATCH_SIZE_MOST
        )
        if not is_right:
            raise ShardError(f"settings of generate are out of their ranges: {rules._asdict()}")
        return rules

    def sampling(self, seed: int) -> Sampling:
        """The same for the draw of an item's tokens."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed)

    def generation(self, end_tokens: Sequence[int]) -> GenerationConfig:
        """The same for transformers, which is told the tokens that are drawn."""
        return GenerationConfig(
            max_new_tokens=self.new_tokens_most,
            do_sample=False,
            eos_token_id=list(end_tokens) or None,
            pad_token_id=end_tokens[0] if end_tokens else 0,
        )


def item_seed(seed: int, position: int) -> int:
    """Seed of the item at a position, by which each of its tokens is drawn."""
    content = b"generate" + seed.to_bytes(16, "little", signed=True)
    digest = blake3(content + position.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") & SEED_MOST


def prompt_tokens(
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
