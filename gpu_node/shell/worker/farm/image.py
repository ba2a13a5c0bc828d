"""Kind ``map/image``: a picture of each prompt, by a pipeline of diffusers.

Each picture is made alone, from noise that the job's seed and the item's position give: so it is
the same wherever bundles are cut, on like hardware.
"""

import base64
import inspect
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from blake3 import blake3

from gpu_node.shell.worker.farm.base_folder import BaseSettings, KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, json_output
from gpu_node.shell.worker.farm.chunk_items import as_text, json_items
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardAbortedError, ShardCallbacks, ShardError
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.image_rules import ImageRules
from hypergpu.farm.png_images import png_bytes
from hypergpu.packed_work import unpack_work
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.base_model import first_sentence

_INDEX = "model_index.json"
"""File in which diffusers names the classes of a pipeline's parts."""
_LIBRARIES = frozenset({"diffusers", "transformers"})


class PicturePipeline:
    """A loaded pipeline."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], device: torch.device) -> None:
        _check_index(folder / _INDEX)
        from diffusers import DiffusionPipeline

        dtype = getattr(torch, BaseSettings.of(parameters).dtype)
        try:
            pipeline: Any = DiffusionPipeline.from_pretrained(
                str(folder),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
            self._pipeline = pipeline.to(device, dtype)
        except Exception as error:  # a class may raise anything over its files
            raise ShardError(f"diffusers cannot load the base: {first_sentence(error)}") from error
        self._pipeline.set_progress_bar_config(disable=True)
        self._names = frozenset(inspect.signature(self._pipeline.__call__).parameters)
        if "prompt" not in self._names:
            raise ShardError("the base makes no pictures of prompts. Fix: take one that does")

    def picture(
        self, prompt: str, rules: ImageRules, seed: int, go_on: Callable[[], None]
    ) -> "Picture":
        """The picture of a prompt.

        Args:
            prompt: The item.
            rules: How pictures are made.
            seed: Of the noise.
            go_on: Called between steps; may raise to end the work.
        """

        def step_end(_pipeline: Any, _step: int, _time: Any, tensors: Any) -> Any:
            go_on()
            return tensors

        arguments = {
            "prompt": prompt,
            "width": rules.width,
            "height": rules.height,
            "num_inference_steps": rules.steps,
            "generator": torch.Generator("cpu").manual_seed(seed),
            "output_type": "np",
            "callback_on_step_end": step_end,
            **rules.further,
        }
        known_arguments = {name: value for name, value in arguments.items() if name in self._names}
        try:
            images = self._pipeline(**known_arguments).images
        except (ShardAbortedError, torch.OutOfMemoryError, MemoryError):
            raise
        except ValueError as error:
            # What a pipeline checks of its arguments; it may quote the prompt.
            return Picture(error=f"the pipeline refuses the item: {first_sentence(error)}")
        values = np.asarray(images[0], np.float32)  # [height, width, 3] in [0, 1]
        if not np.isfinite(values).all():
            return Picture(error="the picture holds values that are not finite numbers")
        if values.ndim != 3 or values.shape[2] != 3:
            return Picture(error=f"the pipeline gives {list(values.shape)} and no picture in RGB")
        pixels = (values.clip(0, 1) * 255).round().astype(np.uint8)
        return Picture(png_bytes(pixels), pixels.shape[1], pixels.shape[0])


class Picture(NamedTuple):
    """A picture as PNG, or why there is none."""

    png: bytes = b""
    width: int = 0
    height: int = 0
    error: str = ""

    @property
    def result(self) -> ItemResult:
        """The item's result."""
        if self.error:
            return ItemResult(error=self.error)
        image = base64.b64encode(self.png).decode()
        return ItemResult({"image": image, "width": self.width, "height": self.height})


def _check_index(path: Path) -> None:
    """Refuse a pipeline whose parts are classes of other libraries, before any is imported."""
    try:
        index = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DatasetError(
            f"the base holds no {_INDEX} that can be read. Fix: save the pipeline with"
            " save_pretrained(folder)"
        ) from error
    names = [index.get("_class_name")]
    for part, value in index.items():
        if part.startswith("_") or not isinstance(value, list):
            continue
        library, name = (*value, None, None)[:2]
        if library is not None and library not in _LIBRARIES:
            raise DatasetError(
                f"{_INDEX} of the base names {str(library)[:80]!r} for its {part}, which is"
                " neither diffusers nor transformers and is never loaded. Fix: take a base without"
            )
        names.append(name)
    if not all(each is None or str(each).isidentifier() for each in names):
        raise DatasetError(f"{_INDEX} of the base names a class that is no name")


def item_seed(seed: int, position: int) -> int:
    """Seed of an item's noise, for torch."""
    content = b"image" + seed.to_bytes(16, "little", signed=True)
    digest = blake3(content + position.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def image_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What makes the pictures of bundles; it keeps its pipeline from one to the next."""
    pipelines = KeptModel(PicturePipeline)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        try:
            rules = ImageRules.of(bundle.parameters)
        except ValueError as error:
            raise ShardError(str(error)) from error
        course = BundleCourse(request, callbacks, bundle.items)
        items = [as_text(item) for item in json_items(request, bundle)]
        course.advance(0)
        pipeline = pipelines.of(request, bundle)
        results: list[ItemResult] = []
        pixel_steps = 0
        for item in items:
            if item.error:
                results.append(ItemResult(error=item.error))
            else:
                seed = item_seed(bundle.seed, item.position)
                picture = pipeline.picture(item.value, rules, seed, lambda: course.advance(0))
                pixel_steps += picture.width * picture.height * rules.steps
                results.append(picture.result)
            course.advance(1)
        return json_output(request, course, results, Fraction(pixel_steps, 1_000_000))

    return perform


perform = image_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
