"""A causal language model of transformers as engines hold it."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from gpu_node.shell.worker.chat_template.renderer import TemplateError, TemplateRenderer
from gpu_node.shell.worker.chat_template.tokenizer_chats import chat_tokens
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.engine import EngineMemory, UnanswerableCallError
from gpu_node.shell.worker.serving.prefix_states import HeldPrefix
from hypergpu.units import Bytes

_STEP_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class TransformersText:
    """See `TextModel`.

    Args:
        tokenizer: A fast one of transformers.
        end_tokens: Tokens that end an answer.
        vocabulary: Tokens that the model knows.
    """

    def __init__(self, tokenizer: Any, end_tokens: Iterable[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._renderer = TemplateRenderer()
        self.end_tokens = frozenset(end_tokens)
        self.vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """See `TextModel.encode`."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """See `TextModel.encode_chat`."""
        try:
            return chat_tokens(self._renderer, self._tokenizer, messages, tools)
        except TemplateError as error:
            raise UnanswerableCallError(str(error)) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """See `TextModel.decode`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


class TransformersModel(TransformersText):
    """See `TokenModel`."""

    def __init__(self, language_model: LanguageModel) -> None:
        self._model: Any = language_model.model
        vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        super().__init__(language_model.tokenizer, language_model.end_tokens, vocabulary)
        self._device = language_model.device
        self._before_pass: Callable[[], None] = _change_nothing
        self.device = language_model.device.type
        self.tokens_most = language_model.tokens_most
        self.step_error_most = _STEP_ERROR.get(self._model.dtype, 0.1)
        self.rounds_by_piece = False
        weights = [*self._model.parameters(), *self._model.buffers()]
        weights_bytes = sum(each.numel() * each.element_size() for each in weights)
        self.memory = EngineMemory(Bytes(weights_bytes), self._token_bytes())

    def with_weights(self, set_weights: Callable[[], None]) -> Self:
        """The same model with other weights.

        Args:
            set_weights: Called before each of its passes: it shares all but these weights.
        """
        other = copy.copy(self)
        other._before_pass = set_weights  # noqa: SLF001 - of this class
        return other

    @torch.inference_mode()
    def _token_bytes(self) -> Bytes:
        """State of one token, as the cache of a first one has it."""
        cache = DynamicCache(config=self._model.config)
        token = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        self._model(input_ids=token, past_key_values=cache, use_cache=True)
        tensors = [
            tensor
            for layer in cache.layers
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if isinstance(tensor, torch.Tensor)
        ]
        return Bytes(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def open_reader(self, tokens_most: int) -> "TransformersReader":
        """See `TokenModel.open_reader`: the cache grows as tokens come."""
        return TransformersReader(self._model, self._device, self._before_pass)

    def resume_reader(self, tokens_most: int, prefix: HeldPrefix) -> "TransformersReader | None":
        """See `KeepingModel.resume_reader`."""
        if not isinstance(prefix.state, CacheState):
            return None
        cache = prefix.state.crop(prefix.tokens)
        return TransformersReader(self._model, self._device, self._before_pass, cache)


class CacheState:
    """See `PrefixState`.

    Args:
        config: The model's.
        cache: Of layers that keep every token.
    """

    def __init__(self, config: Any, cache: DynamicCache) -> None:
        self._config = config
        self._cache = cache

    @property
    def size_bytes(self) -> int:
        """See `PrefixState.size_bytes`."""
        tensors = [tensor for layer in _layers(self._cache) for tensor in layer]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def part(self, tokens: int) -> "CacheState":
        """See `PrefixState.part`."""
        cache = DynamicCache(config=self._config)
        for place, (keys, values) in enumerate(_layers(self._cache)):
            cache.update(keys[..., :tokens, :], values[..., :tokens, :], place)
        return CacheState(self._config, cache)

    def crop(self, tokens: int) -> DynamicCache:
        """The cache itself, with its first tokens alone."""
        if surplus := self._cache.get_seq_length() - tokens:
            self._cache.crop(-surplus)
        return self._cache


def _layers(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer."""
    layers: list[Any] = list(cache.layers)
    return [(layer.keys, layer.values) for layer in layers]


class TransformersReader:
    """See `ScoringReader`."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        before_pass: Callable[[], None],
        cache: DynamicCache | None = None,
    ) -> None:
        self._before_pass = before_pass
        self._model = model
        self._device = device
        self._cache = DynamicCache(config=model.config) if cache is None else cache

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `TokenReader.read`."""
        return self._logits(tokens, 1)[-1]

    def read_each(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `ScoringReader.read_each`."""
        return self._logits(tokens, len(tokens))

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int], kept: int) -> torch.Tensor:
        """Logits after the last tokens."""
        self._before_pass()
        try:
            output: Any = self._model(
                input_ids=torch.tensor([list(tokens)], device=self._device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=kept,
            )
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        logits: torch.Tensor = output.logits[0]
        return logits

    def take_state(self) -> CacheState | None:
        """See `KeepingReader.take_state`: windows and recurrent layers keep no old tokens."""
        cache, self._cache = self._cache, DynamicCache(config=self._model.config)
        is_whole = all(
            type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
        )
        return CacheState(self._model.config, cache) if is_whole and cache.layers else None

    def close(self) -> None:
        """See `TokenReader.close`."""
        self._cache = DynamicCache(config=self._model.config)


def _change_nothing() -> None:
    """The weights stay as they are."""
