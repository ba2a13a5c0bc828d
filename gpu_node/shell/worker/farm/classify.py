"""Kind ``map/classify``: the label of each text, by a classifier of transformers.

Probabilities are those of a softmax over the labels; of each label alone where the base states
that several may be right. Texts beyond the model's length are cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from gpu_node.shell.worker.farm.base_folder import BaseSettings, KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import as_text, json_items
from gpu_node.shell.worker.farm.length_batches import length_batches
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.base_model import (
    check_task,
    load_base,
    load_config,
    load_tokenizer,
    positions_most,
)

_TOKENS_MOST = 16_384
"""Padded tokens of a batch."""
_ITEMS_MOST = 64
_LABELS_SHOWN_MOST = 64
_SEVERAL_LABELS = "multi_label_classification"


class ItemClassifier:
    """A loaded classifier."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], device: torch.device) -> None:
        config = load_config(folder)
        check_task(AutoModelForSequenceClassification, config, "classify texts")
        if config.num_labels < 2:
            raise DatasetError(
                "the base has one output, which is no class. Fix: take a classifier of two labels"
                " or more"
            )
        self._tokenizer = load_tokenizer(folder)
        dtype = BaseSettings.of(parameters).dtype
        auto = AutoModelForSequenceClassification
        self._model = load_base(auto, folder, config, dtype=dtype).model.to(device).eval()
        self._length = positions_most(auto, config)
        self._device = device
        self._labels = [str(config.id2label[number]) for number in range(config.num_labels)]
        self._allows_several = config.problem_type == _SEVERAL_LABELS

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, cut to the model's length."""
        is_cut = self._length is not None
        token_batch = self._tokenizer(text, truncation=is_cut, max_length=self._length)
        return list(token_batch["input_ids"])

    @torch.inference_mode()
    def results(self, token_lists: Sequence[Sequence[int]]) -> list[ItemResult]:
        """A result for each text of a batch."""
        batch = self._tokenizer.pad(
            {"input_ids": [list(tokens) for tokens in token_lists]}, return_tensors="pt"
        )
        logits = self._model(**batch.to(self._device)).logits.float()
        rows = (logits.sigmoid() if self._allows_several else logits.softmax(-1)).cpu()
        return [self._result(row.tolist()) for row in rows]

    def _result(self, shares: Sequence[float]) -> ItemResult:
        if not all(map(math.isfinite, shares)):
            return ItemResult(error="the classifier gives no finite numbers")
        best = max(range(len(shares)), key=shares.__getitem__)
        value: dict[str, Any] = {"label": self._labels[best], "score": shares[best]}
        if len(shares) <= _LABELS_SHOWN_MOST:
            value["scores"] = dict(zip(self._labels, shares, strict=True))
        return ItemResult(value)


def classify_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What classifies the texts of bundles; it keeps its model from one to the next."""
    models = KeptModel(ItemClassifier)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        course = BundleCourse(request, callbacks, bundle.items)
        items = [as_text(item) for item in json_items(request, bundle)]
        course.advance(0)
        classifier = models.of(request, bundle)
        results = [ItemResult(error=item.error) for item in items]
        places = [place for place, item in enumerate(items) if not item.error]
        token_lists = [classifier.tokens(items[place].value) for place in places]
        lengths = [len(tokens) for tokens in token_lists]
        for batch in length_batches(lengths, tokens_most=_TOKENS_MOST, items_most=_ITEMS_MOST):
            batch_results = classifier.results([token_lists[number] for number in batch])
            for number, result in zip(batch, batch_results, strict=True):
                results[places[number]] = result
            course.advance(len(batch))
        values = sum(not result.error for result in results)
        return json_output(request, course, results, values)

    return perform


perform = classify_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
