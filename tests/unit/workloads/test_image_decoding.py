"""Image files of every mode as pixels of one form, and folders whose parts agree."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from PIL import Image

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.pixels import PixelRules, pixel_rules
from hypergpu.workloads.networks.image_decoding import ImageForm, decode_image
from hypergpu.workloads.networks.image_folder import read_folder

FORM = ImageForm(8, 8)
_ORIENTATION = 274
"""EXIF's number of the tag."""


def save_image(path: Path, image: Image.Image, **settings: object) -> str:
    image.save(path, **settings)  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize(
    ("values", "suffix", "grey"),
    [
        (np.full((8, 8), 2_000, np.uint16), "png", 8),
        (np.full((8, 8), 30_000, np.uint16), "png", 117),
        (np.full((8, 8), 65_535, np.uint16), "tif", 255),
        (np.full((8, 8), 0.5, np.float32), "tif", 128),
        (np.full((8, 8), 100.0, np.float32), "tif", 100),
        (np.full((8, 8), 30_000, np.int32), "tif", 117),
    ],
)
def test_grey_of_more_than_eight_bits_is_scaled_by_its_range(
    tmp_path: Path, values: NDArray[Any], suffix: str, grey: int
) -> None:
    path = save_image(tmp_path / f"a.{suffix}", Image.fromarray(values))
    assert np.unique(decode_image(path, FORM)).tolist() == [grey]


@pytest.mark.parametrize("value", [1e6, -1, np.nan])
def test_values_of_no_known_range_are_refused_by_file_and_mode(
    tmp_path: Path, value: float
) -> None:
    path = save_image(tmp_path / "a.tif", Image.fromarray(np.full((8, 8), value, np.float32)))
    with pytest.raises(DatasetError, match=r"a\.tif has the mode F with values of .* Fix: save it"):
        decode_image(path, FORM)


def test_an_image_stands_as_its_orientation_says(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, :4] = 255  # white on the left
    exif = Image.Exif()
    exif[_ORIENTATION] = 6  # the camera was turned: its left is the top
    path = save_image(tmp_path / "a.png", Image.fromarray(pixels), exif=exif)
    upright = decode_image(path, FORM)[0]
    assert upright[:4].min() == 255
    assert upright[4:].max() == 0


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "1", "L", "RGB"])
def test_other_modes_become_colours(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    suffix = "tif" if mode == "CMYK" else "png"
    pixels = decode_image(save_image(tmp_path / f"a.{suffix}", image), FORM)
    assert pixels.shape == (3, 8, 8)
    assert pixels.min() == 255


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png", Image.new("RGBA", (8, 8), (10, 20, 30, 0)))
    assert decode_image(path, FORM).min() == 255


def test_the_middle_part_has_the_shape_of_the_form(tmp_path: Path) -> None:
    pixels = np.zeros((10, 40), np.uint8)
    pixels[:, 10:30] = 200
    path = save_image(tmp_path / "a.png", Image.fromarray(pixels))
    image = decode_image(path, ImageForm(4, 8, 1))
    assert image.shape == (1, 4, 8)
    assert image.min() == 200


def write_parts(folder: Path, **parts: tuple[str, ...]) -> Path:
    for part, names in parts.items():
        for number, name in enumerate(names):
            (folder / part / name).mkdir(parents=True)
            Image.new("L", (8, 8), 50 * number).save(folder / part / name / "a.png")
    return folder


def test_parts_of_other_classes_are_refused_with_what_each_lacks(tmp_path: Path) -> None:
    write_parts(tmp_path, train=("ant", "bee", "cow"), val=("bee", "cow", "dog"))
    pattern = "have other classes: val lacks ant and train lacks dog. Fix: give both the same"
    with pytest.raises(DatasetError, match=pattern):
        read_folder(str(tmp_path), classes=3, form=FORM)


def test_classes_have_the_numbers_of_their_names_on_both_sides(tmp_path: Path) -> None:
    write_parts(tmp_path, train=("ant", "bee"), validation=("bee", "ant"))
    dataset = read_folder(str(tmp_path), classes=("bee", "ant"), form=FORM)
    assert dataset.class_names == ("bee", "ant")
    for samples in (dataset.train, dataset.test):
        assert sorted(samples.labels.tolist()) == [0, 1]
    bee = int(dataset.train.labels.tolist().index(0))
    assert dataset.train.batch(np.array([bee]))[0].max() == 50


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path, a=("x",), b=("y",))
    (tmp_path / "c").mkdir()
    for name in ("a", "b"):
        Image.new("L", (8, 8)).save(tmp_path / name / "1.png")
    with pytest.raises(DatasetError, match=r"/c holds no image\. Fix: put images ending in"):
        read_folder(str(tmp_path), classes=3, form=FORM)


def rules_of(
    folder: Path, config: "transformers.PreTrainedConfig", **settings: object
) -> PixelRules:
    path = folder / "preprocessor_config.json"
    if settings:
        path.write_bytes(msgspec.json.encode(settings))
    return pixel_rules(path, config)


@pytest.mark.parametrize(
    ("config", "settings", "form"),
    [
        ({"image_size": [32, 48]}, {}, ImageForm(32, 48)),
        ({"image_size": 32, "num_channels": 1}, {}, ImageForm(32, 32, 1)),
        ({}, {"size": {"shortest_edge": 40}}, ImageForm(40, 40)),
        ({}, {"size": 40, "crop_size": {"height": 32, "width": 30}},
         ImageForm(32, 30)),
        ({}, {}, ImageForm(224, 224)),
    ],
)  # fmt: skip
def test_a_bases_own_size_and_channels_are_taken(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, object], form: ImageForm
) -> None:
    base_config = transformers.ViTConfig(**config) if config else transformers.ResNetConfig()
    assert rules_of(tmp_path, base_config, **settings).form == form


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({}, -1.0, 1.0),
        ({"do_normalize": False}, 0.0, 1.0),
        ({"do_normalize": False, "do_rescale": False}, 0.0, 255.0),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1.0], "image_std": [1.0]}, -1.0, 1.0),
        ({"image_mean": [0.5, 0.5, 0.5], "image_std": 0.25}, -2.0, 2.0),
    ],
)
def test_pixels_become_what_the_preprocessor_states(
    tmp_path: Path, settings: dict[str, object], least: float, most: float
) -> None:
    import torch

    rules = rules_of(tmp_path, transformers.ViTConfig(image_size=8), **settings)
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    pixels = rules.inputs(images)
    assert (float(pixels.min()), float(pixels.max())) == pytest.approx((least, most))


@pytest.mark.parametrize(
    ("channels", "settings", "said"),
    [
        (4, {}, "takes images of 4 channels, .* Fix: give a base with num_channels 3"),
        (1, {"image_mean": [0.1, 0.2, 0.3]}, "image_mean has 3 values and the base 1 channels"),
        (3, {"image_mean": "grey"}, r"preprocessor_config\.json cannot be read: .* Fix: save it"),
    ],
)
def test_what_images_cannot_become_is_refused_by_name(
    tmp_path: Path, channels: int, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(DatasetError, match=said):
        rules_of(tmp_path, transformers.ViTConfig(num_channels=channels), **settings)
