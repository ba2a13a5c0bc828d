"""Metrics over all held-out samples of digits, as a user writes them with torch."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hypergpu.workloads.digits import digits

CLASSES = 10


def digits_parts() -> list[dict[str, np.ndarray[Any, Any]]]:
    """Digits to train on, and held-out ones."""
    train, test, _ = digits()
    return [
        {"image": part.batch(np.arange(len(part.labels)))[0], "digit": part.labels}
        for part in (train, test)
    ]


def digits_metrics(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Macro F1, and the area under the curve of each class against the rest, averaged."""
    scores, digit = outputs["scores"], outputs["digit"]
    true_classes = F.one_hot(digit, CLASSES)
    guessed_classes = F.one_hot(scores.argmax(1), CLASSES)
    hits = (true_classes * guessed_classes).sum(0)
    f1 = 2 * hits / (true_classes.sum(0) + guessed_classes.sum(0)).clamp(min=1)
    # The mean rank of a class's samples, ties at the middle of their ranks, gives the area.
    ascending_scores = scores.T.contiguous().sort(1).values
    columns = scores.T.contiguous()
    below = torch.searchsorted(ascending_scores, columns)
    up_to = torch.searchsorted(ascending_scores, columns, right=True)
    ranks = (below + up_to + 1).double() / 2
    positives = true_classes.sum(0).double()
    negatives = scores.shape[0] - positives
    sums = (ranks * true_classes.T).sum(1)
    areas = (sums - positives * (positives + 1) / 2) / (positives * negatives)
    return {"f1": f1.mean(), "auc": areas.mean()}
