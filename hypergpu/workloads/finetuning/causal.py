"""The workload ``hf-causal-lm``: an adapter of a causal language model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hypergpu.workloads.datasets import NO_SAMPLES, Array, Dataset, DatasetError
from hypergpu.workloads.entry import Options
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.examples import Example
from hypergpu.workloads.finetuning.adapters import AdaptedModule, AdapterPlan
from hypergpu.workloads.finetuning.base_model import (
    LoadedBase,
    base_folder,
    check_base,
    check_length,
    check_task,
    load_base,
    load_config,
    load_tokenizer,
    positions_most,
)
from hypergpu.workloads.finetuning.packing import (
    RowSeparation,
    SeparatedInputs,
    check_causal,
    inputs_of,
    trial_tokens,
)
from hypergpu.workloads.finetuning.row_files import RowFiles
from hypergpu.workloads.finetuning.rows import DataRow, all_rows, read_rows
from hypergpu.workloads.finetuning.tokens import (
    IGNORED,
    RowRules,
    TokenSamples,
    token_samples,
)
from hypergpu.workloads.splits import HELD_OUT

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
        self.folder = base_folder(data_dir)
        self._digest = check_base(self.folder, str(options["base_digest"]))
        self._plan = AdapterPlan.of(options, "CAUSAL_LM")
        self._dtype = str(options["base_dtype"])
        self._tokenizer = load_tokenizer(self.folder)
        self._config = load_config(self.folder)
        _check_decoder(self._config)
        self._tokens_most = positions_most(self.auto, self._config)
        self._rules = RowRules(
            int(options["sequence_length"]),
            bool(options["packing"]),
            str(options["loss_on"]),
            vocabulary=getattr(self._config.get_text_config(), "vocab_size", None) or 0,
        )
        check_length(self._rules.sequence_length, self._tokens_most)
        self._base: LoadedBase | None = None
        self._inputs: SeparatedInputs | None = None
        self._notes: list[str] = []
        self.evaluation_batch = max(1, _TOKENS_AT_ONCE // self._rules.sequence_length)
        self.gradient_samples_most = max(8, _GRADIENT_TOKENS // self._rules.sequence_length)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `NotedWorkload`."""
        return tuple(dict.fromkeys(self._notes))

    def check(self, data_dir: str, *, has_train: bool) -> None:
        """See `CheckedWorkload`: every row becomes tokens, and no weight is read."""
        if has_train:
            train, held_out, _ = read_rows(Path(data_dir))
            self._samples("train", train, is_packed=False)
        else:
            held_out = all_rows(Path(data_dir)).rows
        self._samples("held_out", held_out, is_packed=False)

    def load(self, data_dir: str) -> Dataset:
        """Rows of the job's folder as samples; all of it is made into tokens here."""
        train, held_out, files = read_rows(Path(data_dir))
        self._note_files(files)
        return Dataset(self._samples("train", train), self._samples("held_out", held_out))

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        rows, files = all_rows(Path(data_dir), HELD_OUT)
        self._note_files(files)
        return Dataset(NO_SAMPLES, self._samples("held_out", rows))

    def node_samples(self, data_dir: str, node_dir: str) -> TokenSamples:
        """See `NodeDataWorkload`."""
        return self._samples("train", all_rows(Path(node_dir)).rows)

    def _note_files(self, files: RowFiles) -> None:
        self._notes.append(files.summary)

    def _samples(
        self, part: str, rows: list[DataRow], *, is_packed: bool | None = None
    ) -> TokenSamples:
        rules = self._rules
        if rules.packing and is_packed is None:
            is_packed = self._row_inputs().separation is not RowSeparation.ALONE
        samples = token_samples(
            part, rows, self._tokenizer, rules._replace(packing=rules.packing and bool(is_packed))
        )
        if samples.rows_left_out:
            self._notes.append(
                f"{part}: {samples.rows_left_out} of {len(rows)} rows are left out: no token that"
                f" counts lies within options.sequence_length = {rules.sequence_length}"
            )
        return samples

    def _row_inputs(self) -> SeparatedInputs:
        """How the base gets rows, tried on it once."""
        if self._inputs is None and not self._rules.packing:
            self._inputs = SeparatedInputs(RowSeparation.ALONE)
        if self._inputs is None:
            model = self._kept_base().model.eval()
            length = self._rules.sequence_length
            self._inputs = inputs_of(
                model, sequence_length=length, length_most=self._tokens_most or length
            )
            if self._inputs.separation is RowSeparation.ALONE:
                self._notes.append(
                    f"rows are not packed, each is a sample of its own: in"
                    f" {type(model).__name__} rows of one sample would see each other"
                )
        return self._inputs

    def _kept_base(self) -> LoadedBase:
        """The base as it was loaded for a trial, or now; the next `model` takes it."""
        if self._base is None:
            self._base = load_base(self.auto, self.folder, self._config, dtype=self._dtype)
            check_causal(self._base.model)
        return self._base

    def model(self) -> nn.Module:
        """The base with its adapter as it is first: it changes nothing yet."""
        self._row_inputs()
        base, self._base = self._kept_base(), None
        return AdaptedModule(base, self._plan, self._digest)

    def loss(self, model: nn.Module, *fields: Tensor) -> Tensor:
        """Mean over the batch's predicted tokens."""
        logits, targets = self._predictions(model, *fields)
        return F.cross_entropy(logits, targets, ignore_index=IGNORED)

    def loss_count(self, *fields: Array) -> int:
        """See `CountedLoss`: predicted tokens."""
        _tokens, labels, _positions = fields
        return int((labels[:, 1:] != IGNORED).sum())

    def evaluate(self, model: nn.Module, *fields: Tensor) -> Sums:
        """See `TorchWorkload`; counts predicted tokens."""
        logits, targets = self._predictions(model, *fields)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        is_counted = targets != IGNORED
        hits = ((logits.argmax(dim=1) == targets) & is_counted).sum()
        return Sums(float(loss), float(hits), int(is_counted.sum()))

    def trial_logits(self, run: Callable[..., Tensor]) -> Tensor:
        """Logits of a few tokens, by which a merged model is compared with its adapter.

        Args:
            run: A model that gives logits for ``input_ids``.
        """
        with torch.inference_mode():
            length = self._tokens_most or self._rules.sequence_length
            tokens = trial_tokens(self._rules.vocabulary or 2, length)
            return run(input_ids=tokens, use_cache=False).float()

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

    def _predictions(
        self, model: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[b * (t - 1), vocabulary]`` of each next token, and its label."""
        row_arguments = self._row_inputs().arguments(positions)
        logits: Any = model(input_ids=tokens.long(), use_cache=False, **row_arguments)
        return logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long()


def _check_decoder(config: PreTrainedConfig) -> None:
    """Refuse bases that are known by their configuration to write nothing by themselves."""
    if config.is_encoder_decoder:
        raise DatasetError(
            f"base is an encoder and a decoder ({config.model_type}): it needs an input beside the"
            " text that it writes. Fix: give a causal language model, such as SmolLM2"
        )
    check_task(CausalLmWorkload.auto, config, "write text")


class CausalLmBuilder(NamedTuple):
    """Builds the workload of each job. Implements `JobWorkload`."""

    options: Options

    def for_job(self, data_dir: str) -> CausalLmWorkload:
        """See `JobWorkload`."""
        return CausalLmWorkload(self.options, data_dir)


def causal_lm(options: Options) -> CausalLmBuilder:
    """Builder of ``hf-causal-lm``."""
    return CausalLmBuilder(options)
