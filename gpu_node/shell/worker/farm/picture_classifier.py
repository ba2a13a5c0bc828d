"""The label of each picture, by a classifier of transformers and the processor in its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedConfig

from gpu_node.shell.worker.farm.base_folder import BaseSettings
from gpu_node.shell.worker.farm.chunk_items import TextItem
from gpu_node.shell.worker.farm.label_shares import LabelShares
from gpu_node.shell.worker.farm.picture_samples import (
    decoded_picture,
    is_picture,
    picture_content,
)
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.base_model import first_sentence, load_base


class PictureClassifier:
    """A loaded classifier of pictures. Implements `Classifier`."""

    def __init__(
        self,
        folder: Path,
        config: PreTrainedConfig,
        parameters: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._labels = LabelShares(config)
        dtype = BaseSettings.of(parameters).dtype
        auto = AutoModelForImageClassification
        self._model = load_base(auto, folder, config, dtype=dtype).model.to(device).eval()
        self._dtype = getattr(torch, dtype)
        self._device = device
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"the base has no image processor that can be loaded: {first_sentence(error)}."
                " Fix: save the processor's files beside the model: save_pretrained(folder)"
            ) from error

    def read(self, item: TextItem) -> tuple[bytes, str]:
        """See `Classifier`."""
        if item.error or not is_picture(item):
            return b"", item.error or "the item is no picture, and the base classifies pictures"
        return picture_content(item)

    def length(self, _sample: bytes) -> int:
        """See `Classifier`: all pictures become equally large."""
        return 1

    @torch.inference_mode()
    def results(self, samples: Sequence[bytes]) -> list[ItemResult]:
        """See `Classifier`."""
        results: list[ItemResult] = []
        pictures: dict[int, Image.Image] = {}
        for place, content in enumerate(samples):
            picture, error = decoded_picture(content)
            results.append(ItemResult(error=error))
            if picture is not None:
                pictures[place] = picture
        if not pictures:
            return results
        inputs = self._processor(images=[*pictures.values()], return_tensors="pt")
        values = inputs["pixel_values"].to(self._device, self._dtype)
        logits = self._model(pixel_values=values).logits.float()
        for place, result in zip(pictures, self._labels.results(logits), strict=True):
            results[place] = result
        return results
