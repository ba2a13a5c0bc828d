"""Pictures of prompts, against the plain pipeline of diffusers."""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from gpu_node.shell.worker.farm.image import item_seed
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.image_rules import ImageRules
from tests.bundles import BundleFolder
from tests.tiny_pipelines import save_pipeline

RULES: dict[str, Any] = {"width": 48, "height": 32, "steps": 3, "guidance_scale": 4.0}
PROMPTS = ["a cat", "two dogs on a hill", "a cat"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder."""
    return save_pipeline(tmp_path_factory.mktemp("pipeline") / "base")


def bundles_of(folder: Path, base: Path, items: list[Any]) -> BundleFolder:
    bundles = BundleFolder(folder, "image")
    bundles.add_base(base)
    bundles.add_items(items)
    return bundles


def pixels_of(result: ItemResult) -> NDArray[np.uint8]:
    with Image.open(BytesIO(base64.b64decode(result.value["image"]))) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


def test_pictures_are_those_of_diffusers(tmp_path: Path, base: Path) -> None:
    from diffusers import DiffusionPipeline

    results = bundles_of(tmp_path, base, PROMPTS).values(seed=9, **RULES)
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    for position, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        generator = torch.Generator("cpu").manual_seed(item_seed(9, position))
        plain = pipeline(
            prompt,
            width=48,
            height=32,
            num_inference_steps=3,
            guidance_scale=4.0,
            generator=generator,
        ).images[0]
        pixels = pixels_of(result)
        assert pixels.shape == (32, 48, 3)
        assert int(np.abs(pixels.astype(int) - np.asarray(plain).astype(int)).max()) <= 1
        assert pixels.std() > 5
    assert results[0] != results[2]  # the same prompt, at another place


def test_a_picture_is_the_same_wherever_bundles_are_cut(tmp_path: Path, base: Path) -> None:
    bundles = bundles_of(tmp_path, base, PROMPTS)
    whole = bundles.perform(seed=2, **RULES)[1].splitlines()
    part = bundles.perform(start=1, items=2, seed=2, **RULES)[1].splitlines()
    assert whole[1:] == part
    assert bundles.perform(seed=3, **RULES)[1].splitlines() != whole


def test_work_is_counted_in_megapixel_steps_rounded_up_once(tmp_path: Path, base: Path) -> None:
    bundles = bundles_of(tmp_path, base, [*PROMPTS, 7])
    result, _ = bundles.perform(**RULES)
    assert (result.items, result.failures) == (3, 1)
    assert result.units == 1  # 3 x 48 x 32 x 3 are 13,824 of a million
    assert ImageRules.of({"width": 1024, "height": 1000, "steps": 3}).megapixel_steps_most == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unet": ["os", "system"]}, "neither diffusers nor transformers and is never loaded"),
        ({"_class_name": "os.system"}, "names a class that is no name"),
        ({"_class_name": "NoSuchPipeline"}, "diffusers cannot load the base"),
    ],
)
def test_a_pipeline_of_other_code_is_refused(
    tmp_path: Path, base: Path, change: dict[str, Any], reason: str
) -> None:
    import shutil

    own = tmp_path / "base"
    shutil.copytree(base, own)
    index = own / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(ShardError, match=reason):
        bundles_of(tmp_path, own, PROMPTS).perform(**RULES)


def test_settings_out_of_range_are_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ShardError, match="width of image is 50: a multiple of 8 of 8 to 4096"):
        bundles_of(tmp_path, base, PROMPTS).perform(width=50)
