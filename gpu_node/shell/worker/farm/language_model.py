"""A causal language model of a bundle's base, as transformers loads it, with its tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from gpu_node.shell.worker.farm.base_folder import BaseSettings
from hypergpu.workloads.finetuning.base_model import (
    check_task,
    load_base,
    load_config,
    load_tokenizer,
    positions_most,
)


class LanguageModel(NamedTuple):
    """A loaded model."""

    model: Any
    tokenizer: Any
    device: torch.device
    tokens_most: int | None
    """Tokens that it takes at once; None: any number."""

    @classmethod
    def load(
        cls, folder: Path, parameters: Mapping[str, Any], device: torch.device
    ) -> "LanguageModel":
        """The model of a folder, in evaluation mode.

        Raises:
            DatasetError: The base is no causal language model that may be loaded.
        """
        config = load_config(folder)
        check_task(AutoModelForCausalLM, config, "write text")
        tokenizer = load_tokenizer(folder)
        dtype = BaseSettings.of(parameters).dtype
        model = load_base(AutoModelForCausalLM, folder, config, dtype=dtype).model
        tokens_most = positions_most(AutoModelForCausalLM, config)
        return cls(model.to(device).eval(), tokenizer, device, tokens_most)

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text: those that the base states for its texts, and the tokenizer's. A
        chat model often has one for its turns and another for documents.
        """
        base_end: Any = self.model.generation_config.eos_token_id
        base_ends = base_end if isinstance(base_end, list) else [base_end]
        every = [*base_ends, self.tokenizer.eos_token_id]
        return sorted({int(each) for each in every if each is not None})

    @property
    def first_token(self) -> int | None:
        """The token that a text's first one is conditioned on; None: the tokenizer has none."""
        if self.tokenizer.bos_token_id is not None:
            return int(self.tokenizer.bos_token_id)
        end = self.tokenizer.eos_token_id
        return None if end is None else int(end)
