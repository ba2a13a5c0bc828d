"""Labels with their shares, from the logits of a classifier."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from hypergpu.farm.bundle_results import ItemResult
from hypergpu.workloads.datasets import DatasetError

_LABELS_SHOWN_MOST = 64
_SEVERAL_LABELS = "multi_label_classification"


class LabelShares:
    """The labels of a base.

    Args:
        config: The base's.

    Raises:
        DatasetError: It has fewer than two.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        if config.num_labels < 2:
            raise DatasetError(
                "the base has one output, which is no class. Fix: take a classifier of two labels"
                " or more"
            )
        self._labels = [str(config.id2label[number]) for number in range(config.num_labels)]
        self._allows_several = config.problem_type == _SEVERAL_LABELS

    def results(self, logits: torch.Tensor) -> list[ItemResult]:
        """A result for each row of ``float32[items, labels]``."""
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
