"""The label of each picture, by a classifier of transformers and the processor in its folder."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedConfig

from gpu_node.shell.worker.farm.base_folder import BaseSettings
from gpu_node.shell.worker.farm.chunk_items import TextItem
from gpu_node.shell.worker.farm.label_shares import LabelShares
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
        text = item.value.get("image") if isinstance(item.value, dict) else None
        if item.error or not isinstance(text, str):
            return b"", item.error or "the item is no picture, and the base classifies pictures"
        try:
            return base64.b64decode(text, validate=True), ""
        except binascii.Error as error:
            return b"", f"the item is no picture: {error}"

    def length(self, _sample: bytes) -> int:
        """See `Classifier`: all pictures become equally large."""
        return 1

    @torch.inference_mode()
    def results(self, samples: Sequence[bytes]) -> list[ItemResult]:
        """See `Classifier`."""
        results: list[ItemResult] = []
        pictures: dict[int, Image.Image] = {}
        for place, content in enumerate(samples):
            results.append(ItemResult())
            try:
                pictures[place] = _decode_picture(content)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                results[place] = ItemResult(
                    error=f"the picture cannot be read: {first_sentence(error)}"
                )
        if not pictures:
            return results
        inputs = self._processor(images=[*pictures.values()], return_tensors="pt")
        values = inputs["pixel_values"].to(self._device, self._dtype)
        logits = self._model(pixel_values=values).logits.float()
        for place, result in zip(pictures, self._labels.results(logits), strict=True):
            results[place] = result
        return results


def _decode_picture(content: bytes) -> Image.Image:
    """A picture upright and in colours."""
    with Image.open(BytesIO(content)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
