"""Kind ``map/classify``: the label of each text or picture, by a classifier of transformers.

Probabilities are those of a softmax over the labels; of each label alone where the base states
that several may be right.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, json_items
from gpu_node.shell.worker.farm.length_batches import length_batches
from gpu_node.shell.worker.farm.picture_classifier import PictureClassifier
from gpu_node.shell.worker.farm.text_classifier import SequenceClassifier
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work
from hypergpu.workloads.finetuning.base_model import check_task, load_config

_TOKENS_MOST = 16_384
"""Padded tokens of a batch."""
_ITEMS_MOST = 64


class Classifier(Protocol):
    """A model that labels items of one form."""

    def read(self, item: TextItem) -> tuple[Any, str]:
        """What `results` takes of an item, or why it cannot be done."""
        ...

    def length(self, sample: Any) -> int:
        """Length of what was read, in any measure that grows with memory."""
        ...

    def results(self, samples: Sequence[Any]) -> list[ItemResult]:
        """A result for each item of a batch."""
        ...


def load_classifier(
    folder: Path, parameters: Mapping[str, Any], device: torch.device
) -> Classifier:
    """The classifier of a folder: of pictures where its configuration is that of one.

    Raises:
        DatasetError: The base is no classifier that may be loaded.
    """
    config = load_config(folder)
    if type(config) in AutoModelForImageClassification._model_mapping:  # noqa: SLF001
        return PictureClassifier(folder, config, parameters, device)
    check_task(AutoModelForSequenceClassification, config, "classify texts")
    return SequenceClassifier(folder, config, parameters, device)


def classify_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What classifies the items of bundles; it keeps its model from one to the next."""
    models = KeptModel(load_classifier)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        course = BundleCourse(request, callbacks, bundle.items)
        items = json_items(request, bundle)
        course.advance(0)
        classifier = models.of(request, bundle)
        samples: dict[int, Any] = {}
        results = [ItemResult()] * len(items)
        for place, item in enumerate(items):
            sample, error = classifier.read(item)
            if error:
                results[place] = ItemResult(error=error)
            else:
                samples[place] = sample
        places = list(samples)
        lengths = [classifier.length(sample) for sample in samples.values()]
        for batch in length_batches(lengths, tokens_most=_TOKENS_MOST, items_most=_ITEMS_MOST):
            batch_places = [places[number] for number in batch]
            batch_results = classifier.results([samples[place] for place in batch_places])
            for place, result in zip(batch_places, batch_results, strict=True):
                results[place] = result
            course.advance(len(batch))
        values = sum(not result.error for result in results)
        return json_output(request, course, results, values)

    return perform


perform = classify_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
