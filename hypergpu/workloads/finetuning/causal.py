"""The workload ``hf-causal-lm``: an adapter of a causal language model."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hypergpu.workloads.entry import Options
from hypergpu.workloads.finetuning.adapters import AdaptedModule, AdapterPlan
from hypergpu.workloads.finetuning.base_model import (
    base_folder,
    check_base,
    load_base,
    load_config,
    load_tokenizer,
)
from hypergpu.workloads.finetuning.rows import all_rows, read_rows
from hypergpu.workloads.finetuning.tokens import IGNORED, RowRules, TokenSamples, token_samples
from hypergpu.workloads.workload import NO_SAMPLES, Array, Dataset, DatasetError, Example, Sums

_TOKENS_AT_ONCE = 4096
"""Logits of so many tokens are held at once in an evaluation."""
_GRADIENT_TOKENS = 1 << 16
_PROMPT_TOKENS = 32
_WRITTEN_TOKENS = 24


class CausalLmWorkload:
    """A base with an adapter, and a job's rows. Implements `TorchWorkload`.

    Raises:
        DatasetError: The base cannot be used.
    """

    metric = "perplexity"
    auto = AutoModelForCausalLM
    pipeline = "text-generation"

    def __init__(self, options: Options, data_dir: str) -> None:
        self._folder = base_folder(data_dir)
        self._digest = check_base(self._folder, str(options["base_digest"]))
        self._plan = AdapterPlan.of(options, "CAUSAL_LM")
        self._dtype = str(options["base_dtype"])
        self._rules = RowRules(
            int(options["sequence_length"]), bool(options["packing"]), str(options["loss_on"])
        )
        self._tokenizer = load_tokenizer(self._folder)
        self._config = load_config(self._folder)
        self._check_length()
        self.evaluation_batch = max(1, _TOKENS_AT_ONCE // self._rules.sequence_length)
        self.gradient_samples_most = max(8, _GRADIENT_TOKENS // self._rules.sequence_length)

    def load(self, data_dir: str) -> Dataset:
        """Rows of the job's folder as samples; all of it is made into tokens here."""
        train, held_out = read_rows(Path(data_dir))
        return Dataset(
            token_samples("train", train, self._tokenizer, self._rules),
            token_samples("held_out", held_out, self._tokenizer, self._rules),
        )

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        return Dataset(NO_SAMPLES, self._tokens("held_out", data_dir))

    def node_samples(self, data_dir: str, node_dir: str) -> TokenSamples:
        """See `NodeDataWorkload`."""
        return self._tokens("train", node_dir)

    def _tokens(self, part: str, folder: str) -> TokenSamples:
        return token_samples(part, all_rows(Path(folder)), self._tokenizer, self._rules)

    def model(self) -> nn.Module:
        """The base with its adapter as it is first: it changes nothing yet."""
        base = load_base(self.auto, self._folder, self._config, dtype=self._dtype)
        return AdaptedModule(base, self._plan, self._digest)

    def loss(self, model: nn.Module, *fields: Tensor) -> Tensor:
        """Mean over the batch's predicted tokens."""
        logits, wanted = _predictions(model, *fields)
        return F.cross_entropy(logits, wanted, ignore_index=IGNORED)

    def loss_count(self, *fields: Array) -> int:
        """See `CountedLoss`: predicted tokens."""
        _tokens, labels, _positions = fields
        return int((labels[:, 1:] != IGNORED).sum())

    def evaluate(self, model: nn.Module, *fields: Tensor) -> Sums:
        """See `TorchWorkload`; counts predicted tokens."""
        logits, wanted = _predictions(model, *fields)
        loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        counted = wanted != IGNORED
        hits = ((logits.argmax(dim=1) == wanted) & counted).sum()
        return Sums(float(loss), float(hits), int(counted.sum()))

    def save_reader(self, folder: Path) -> None:
        """Save what makes tokens of text beside a model."""
        self._tokenizer.save_pretrained(folder)

    def examples(self, inputs: Array, *_others: Array) -> list[Example]:
        """The beginning of a held-out sample."""
        return [Example(text=str(self._tokenizer.decode(inputs[0, :_PROMPT_TOKENS])))]

    def outputs(self, model: nn.Module, inputs: Tensor) -> list[int | str]:
        """What the model writes after it, the likeliest token each time."""
        text = inputs[:1, :_PROMPT_TOKENS].long()
        start = text.shape[1]
        for _ in range(_WRITTEN_TOKENS):
            logits = model(input_ids=text, use_cache=False)[:, -1]
            text = torch.cat([text, logits.argmax(dim=-1, keepdim=True)], dim=1)
        return [str(self._tokenizer.decode(text[0, start:].cpu().numpy().astype(np.int64)))]

    def _check_length(self) -> None:
        most = getattr(self._config, "max_position_embeddings", None)
        if isinstance(most, int) and self._rules.sequence_length > most:
            raise DatasetError(
                f"options.sequence_length is {self._rules.sequence_length} and the base takes"
                f" {most} tokens. Fix: set options.sequence_length = {most}"
            )


def _predictions(
    model: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits ``[b * (t - 1), vocabulary]`` of each next token, and its label."""
    logits: Any = model(input_ids=tokens.long(), position_ids=positions.long(), use_cache=False)
    return logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long()


class CausalLmBuilder(NamedTuple):
    """Builds the workload of each job. Implements `JobWorkload`."""

    options: Options

    def for_job(self, data_dir: str) -> CausalLmWorkload:
        """See `JobWorkload`."""
        return CausalLmWorkload(self.options, data_dir)


def causal_lm(options: Options) -> CausalLmBuilder:
    """Builder of ``hf-causal-lm``."""
    return CausalLmBuilder(options)
