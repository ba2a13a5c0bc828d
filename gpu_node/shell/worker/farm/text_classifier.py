"""The label of each text, by a classifier of transformers. Texts beyond its length are cut."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from gpu_node.shell.worker.farm.base_folder import BaseSettings
from gpu_node.shell.worker.farm.chunk_items import TextItem, as_text
from gpu_node.shell.worker.farm.label_shares import LabelShares
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.workloads.finetuning.base_model import load_base, load_tokenizer, positions_most


class SequenceClassifier:
    """A loaded classifier of texts. Implements `Classifier`."""

    def __init__(
        self,
        folder: Path,
        config: PreTrainedConfig,
        parameters: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._labels = LabelShares(config)
        self._tokenizer = load_tokenizer(folder)
        dtype = BaseSettings.of(parameters).dtype
        auto = AutoModelForSequenceClassification
        self._model = load_base(auto, folder, config, dtype=dtype).model.to(device).eval()
        self._length = positions_most(auto, config)
        self._device = device

    def read(self, item: TextItem) -> tuple[list[int], str]:
        """See `Classifier`: the tokens of a text, cut to the model's length."""
        text = as_text(item)
        if text.error:
            return [], text.error
        is_cut = self._length is not None
        token_batch = self._tokenizer(text.value, truncation=is_cut, max_length=self._length)
        return list(token_batch["input_ids"]), ""

    def length(self, sample: Sequence[int]) -> int:
        """See `Classifier`: in tokens."""
        return len(sample)

    @torch.inference_mode()
    def results(self, samples: Sequence[Sequence[int]]) -> list[ItemResult]:
        """See `Classifier`."""
        batch = self._tokenizer.pad(
            {"input_ids": [list(tokens) for tokens in samples]}, return_tensors="pt"
        )
        return self._labels.results(self._model(**batch.to(self._device)).logits.float())
