"""A slice: some consecutive layers of a decoder as a model of transformers of its own.

The whole model is made of its configuration without memory (on ``meta``), and layers that others
hold are cut away. So rules that go by a layer's number hold, and no code is written for any
architecture. `architecture_check` tells whether slices of one give what the whole model gives.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.workloads.finetuning.base_model import first_sentence
from hypergpu.workloads.slices.ragged_attention import (
    RAGGED,
    RaggedPass,
    SessionKeys,
    SessionSegment,
)


class SliceError(Exception):
    """The model cannot be cut. The text says why, and what helps."""


_LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types", "layers_block_type")
"""Fields of configurations with an entry for each layer, which `forward` reads."""
_INPUT_FACTORS = ("embedding_multiplier",)
"""Attributes of models by which `forward` scales what it is given, embeddings or not."""


class LayerSlice:
    """A run of layers, with the embedding if it is the first and the head if it is the last.

    Args:
        config: The whole model's; not changed.
        span: Its layers.

    Raises:
        SliceError: No slice can be made of such a model.
    """

    def __init__(self, config: PreTrainedConfig, span: LayerSpan) -> None:
        config = copy.deepcopy(config)
        self.layers_total = layers_of(config)
        self.span = span
        if not 0 <= span.first < span.end <= self.layers_total:
            raise SliceError(f"layers {span.first} to {span.end} of {self.layers_total}")
        self.model = _empty_decoder(config)
        self._trunk: Any = self.model.base_model
        list_name = _layer_list_name(self._trunk, self.layers_total)
        self.layer_prefix = f"{self.model.base_model_prefix}.{list_name}."
        """What names of tensors of layers begin with; the layer's index follows."""
        self._pass = RaggedPass()
        self._cut(list_name)
        self._cut_config(config)
        if not self.is_first:
            self._take_states()
        if not self.is_last:
            self._give_states()
        self.model.requires_grad_(requires_grad=False)
        self.model.eval()

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens, and embeds them."""
        return self.span.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.span.end == self.layers_total

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def whole_names(self) -> Iterator[tuple[str, str]]:
        """Names of its tensors, each with the name that the whole model has for it."""
        for name in self.model.state_dict():
            yield name, self.whole_name(name)

    def whole_name(self, name: str) -> str:
        """Name that the whole model has for a tensor of the slice."""
        if not name.startswith(self.layer_prefix):
            return name
        index, _, rest = name.removeprefix(self.layer_prefix).partition(".")
        return f"{self.layer_prefix}{int(index) + self.span.first}.{rest}"

    def _cut(self, list_name: str) -> None:
        kept_layers = list(getattr(self._trunk, list_name))[self.span.first : self.span.end]
        setattr(self._trunk, list_name, nn.ModuleList(kept_layers))
        for index, layer in enumerate(kept_layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index
                    module.ragged_pass = self._pass

    def _cut_config(self, config: PreTrainedConfig) -> None:
        """Cut the configuration that the modules share: it was whole when they were made."""
        config = self.model.config
        config.num_hidden_layers = self.span.count
        for name in _LAYER_LISTS:
            entries = getattr(config, name, None)
            if isinstance(entries, list) and len(entries) == self.layers_total:
                setattr(config, name, entries[self.span.first : self.span.end])

    def _take_states(self) -> None:
        self.model.set_input_embeddings(None)
        for name in _INPUT_FACTORS:
            if hasattr(self._trunk, name):
                setattr(self._trunk, name, 1.0)

    def _give_states(self) -> None:
        norms = [name for name, _ in self._trunk.named_children() if "norm" in name]
        if not norms:
            raise SliceError("its final norm is not found by its name")
        setattr(self._trunk, norms[-1], nn.Identity())
        head = self.model.get_output_embeddings()
        for name, module in list(self.model.named_children()):
            if module is head:
                setattr(self.model, name, None)

    @torch.inference_mode()
    def compute(
        self,
        inputs: torch.Tensor,
        segments: Sequence[SessionSegment],
        logit_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute one pass over tokens of any sessions, as `compute_rows`, without a graph."""
        return self.compute_rows(inputs, segments, logit_rows)

    def compute_rows(
        self,
        inputs: torch.Tensor,
        segments: Sequence[SessionSegment],
        logit_rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute one pass over tokens of any sessions, with a graph where gradients are on.

        Args:
            inputs: ``int64[tokens]`` of the first slice; else ``float[tokens, hidden_size]``.
            segments: Cover all tokens, in order.
            logit_rows: Of the last slice: rows of whose logits something is wanted; None: all.

        Returns:
            Hidden states ``[tokens, hidden_size]``, or logits ``[rows, vocabulary]`` of the last
            slice.
        """
        self._pass.segments = segments
        places = [
            torch.arange(each.start, each.start + each.tokens, device=inputs.device)
            for each in segments
        ]
        arguments: dict[str, Any] = {
            ("input_ids" if self.is_first else "inputs_embeds"): inputs[None],
            "position_ids": torch.cat(places)[None],
            "past_key_values": self._pass,
            "use_cache": True,
        }
        try:
            if not self.is_last:
                states: torch.Tensor = self._trunk(**arguments).last_hidden_state[0]
                return states
            if logit_rows is not None:
                arguments["logits_to_keep"] = torch.tensor(logit_rows, device=inputs.device)
            # The model's own forward scales or caps its logits.
            logits: torch.Tensor = self.model(**arguments).logits[0]
            return logits
        finally:
            self._pass.segments = ()


def open_session() -> SessionKeys:
    """Storage for the keys and values of one session."""
    return SessionKeys()


def layers_of(config: PreTrainedConfig) -> int:
    """Layers of a decoder.

    Raises:
        SliceError: It states none, or is no plain decoder.
    """
    if config.get_text_config() is not config:
        raise SliceError(
            f"a {config.model_type} is more than a decoder of text. Fix: save its language model"
        )
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise SliceError(f"a {config.model_type} states no num_hidden_layers")
    return count


def _empty_decoder(config: PreTrainedConfig) -> Any:
    """The whole decoder without memory for its parameters; tables of positions are real."""
    try:
        with init_empty_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoModelForCausalLM.from_config(config, attn_implementation=RAGGED)
    except Exception as error:  # a class may raise anything over a configuration
        raise SliceError(
            f"a {config.model_type} cannot be made with attention of ours: {first_sentence(error)}"
        ) from error


def _layer_list_name(trunk: nn.Module, count: int) -> str:
    names = [
        name
        for name, module in trunk.named_children()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(names) != 1:
        raise SliceError("its layers are not one list of modules")
    return names[0]
