"""A folder of pictures, classified and embedded as plain transformers does."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from gpu_node.shell.worker.trainer import ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import read_vector_results
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.user.farm.items import ItemFields, ItemSource
from hypergpu.user.farm.program_parts import program_parts
from hypergpu.user.farm.request import settings_of
from hypergpu.user.farm.starting import JobParts, MapOrder
from hypergpu.workloads.networks.forward_program import forward_program
from hypergpu.workloads.networks.image_decoding import ImageForm, decode_image
from tests.bundles import BundleFolder
from tests.tiny_bases import save_encoder
from tests.tiny_pipelines import save_clip


def save_picture_classifier(folder: Path) -> Path:
    """A ViT of one layer of 16 numbers, with random weights."""
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    torch.manual_seed(4)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def write_pictures(folder: Path) -> list[Path]:
    """Eight pictures of unequal size and form."""
    draws = np.random.default_rng(2)
    (folder / "more").mkdir(parents=True)
    paths = []
    for number in range(8):
        shape = (20 + 9 * number, 50 - 3 * number, 3)
        image = Image.fromarray(draws.integers(0, 256, shape, dtype=np.uint8))
        name = ["a{}.png", "more/b{}.jpg", "c{}.webp", "d{}.gif"][number % 4].format(number)
        paths.append(folder / name)
        image.save(paths[-1])
    return sorted(paths)


def test_pictures_are_classified_as_transformers_does(tmp_path: Path) -> None:
    base = save_picture_classifier(tmp_path / "base")
    paths = write_pictures(tmp_path / "pictures")
    source = ItemSource(tmp_path / "pictures", ItemForm.TEXT_OR_PICTURE, ItemFields())
    items = list(source.items())
    assert [item.id for item in items] == [
        path.relative_to(tmp_path / "pictures").as_posix() for path in paths
    ]
    bundles = BundleFolder(tmp_path, "classify")
    bundles.add_base(base)
    bundles.add_items([*(item.value for item in items), "a text", {"image": "UE5H"}])
    *results, text, no_picture = bundles.values()
    model = transformers.AutoModelForImageClassification.from_pretrained(base)
    processor = transformers.AutoImageProcessor.from_pretrained(base)
    for path, result in zip(paths, results, strict=True):
        with Image.open(path) as image, torch.inference_mode():
            inputs = processor(images=image.convert("RGB"), return_tensors="pt")
            shares = model(**inputs).logits[0].softmax(-1)
        assert result.value["label"] == model.config.id2label[int(shares.argmax())]
        assert list(result.value["scores"].values()) == pytest.approx(shares.tolist(), rel=1e-4)
    assert text.error == "the item is no picture, and the base classifies pictures"
    assert no_picture.error.startswith("the picture cannot be read: ")


def test_pictures_and_texts_are_embedded_as_by_plain_clip(tmp_path: Path) -> None:
    base = save_clip(tmp_path / "base")
    paths = write_pictures(tmp_path / "pictures")
    source = ItemSource(tmp_path / "pictures", ItemForm.TEXT_OR_PICTURE, ItemFields())
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(base)
    bundles.add_items([*(item.value for item in source.items()), "a cat", {"image": "UE5H"}, 7])
    vectors, failed_vectors = bundles.vectors()[:-2], bundles.vectors()[-2:]
    model = transformers.CLIPModel.from_pretrained(base)
    processor = transformers.CLIPProcessor.from_pretrained(base)
    with torch.inference_mode():
        for path, vector in zip(paths, vectors[:-1], strict=True):
            with Image.open(path) as image:
                inputs = processor(images=image.convert("RGB"), return_tensors="pt")
            features = model.get_image_features(**inputs).pooler_output[0]
            assert vector == pytest.approx(features.numpy(), abs=1e-5)
        inputs = processor(text="a cat", return_tensors="pt")
        features = model.get_text_features(**inputs).pooler_output[0]
    assert vectors[-1] == pytest.approx(features.numpy(), abs=1e-5)
    assert not failed_vectors.any()
    result, _ = bundles.perform()
    assert (result.items, result.failures) == (len(paths) + 1, 2)


def test_a_base_of_pictures_alone_and_one_of_texts_alone_say_what_they_take(
    tmp_path: Path,
) -> None:
    (path, *_) = write_pictures(tmp_path / "pictures")
    picture = {"image": base64.b64encode(path.read_bytes()).decode()}
    for name, base, failing_place, text in (
        ("vit", save_picture_classifier(tmp_path / "vit-base"), 0, "a text, and the base embeds"),
        ("texts", save_encoder(tmp_path / "base"), 1, "a picture, and the base embeds texts alone"),
    ):
        bundles = BundleFolder(tmp_path / name, "embed")
        bundles.add_base(base)
        bundles.add_items(["1 2", picture])
        result, content = bundles.perform()
        errors = read_vector_results(content, 2).errors
        assert result.failures == 1
        assert text in errors[failing_place]


def test_folders_that_are_no_items_are_refused_by_the_sentence(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    with pytest.raises(HyperGPUError, match=r"holds no text file\. Fix: add files ending in \.md"):
        list(ItemSource(tmp_path, ItemForm.TEXT, ItemFields()).items())
    (tmp_path / "note.txt").write_text("a text", "utf-8")
    with pytest.raises(HyperGPUError, match="holds 1 texts and 8 pictures"):
        list(ItemSource(tmp_path, ItemForm.TEXT_OR_PICTURE, ItemFields()).items())


def test_a_picture_that_does_not_fit_is_told_by_itself(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(b"x" * (3 << 20 | 1))
    (item,) = ItemSource(tmp_path, ItemForm.TEXT_OR_PICTURE, ItemFields()).items()
    assert item.error == "large.png: the picture has 3145729 bytes, 3145728 at most"


class Shades(torch.nn.Module):
    """A module of one's own over pictures: three features of their pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layer = torch.nn.Conv2d(3, 3, 5, stride=4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(image.float() / 255)
        return features.mean((2, 3))


def picture_parts(folder: Path, out: Path, **parameters: object) -> JobParts:
    """What `hypergpu.map` makes of a module and a folder of pictures."""
    settings = settings_of("program", {"parameters": parameters})
    settings.check()
    out.mkdir(exist_ok=True)
    return program_parts(Shades(), MapOrder(settings, folder, out), out)


def test_pictures_go_through_a_module_of_ones_own(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    parts = picture_parts(tmp_path / "pictures", tmp_path / "out", height=24, width=32)
    names = sorted([*paths, tmp_path / "pictures" / "broken.png"])
    assert parts.items.ids == [path.relative_to(tmp_path / "pictures").as_posix() for path in names]
    bundles = BundleFolder(tmp_path / "node", "program")
    for name, path in parts.files.items():
        bundles.add_file(name, path.read_bytes())
    for chunk, path in zip(parts.items.manifest.chunks, parts.items.paths, strict=True):
        bundles.add_lines(path.read_bytes(), chunk.items)
    result, content = bundles.perform()
    outputs = read_vector_results(content, len(names))
    broken_place = names.index(tmp_path / "pictures" / "broken.png")
    assert (result.failures, [*outputs.errors]) == (1, [broken_place])
    assert outputs.errors[broken_place].startswith("the picture is no image that can be read")
    pixels = [decode_image(str(path), ImageForm(24, 32)) for path in paths]
    with torch.inference_mode():
        module_output = Shades()(torch.from_numpy(np.stack(pixels))).numpy()
    rows = np.delete(outputs.values, broken_place, axis=0)
    np.testing.assert_allclose(rows, module_output, atol=1e-5)
    np.testing.assert_allclose(bundles.vectors(start=3, items=4), outputs.values[3:7], atol=1e-6)


def test_forms_of_pictures_that_no_module_takes_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    for parameters, text in (
        ({"height": 0}, "pictures of height 0, width 224 and 3 channels"),
        ({"channels": 2}, "and 2 channels"),
        ({"depth": 3}, "depth"),
    ):
        with pytest.raises(HyperGPUError, match=text):
            picture_parts(tmp_path / "pictures", tmp_path / "out", **parameters)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text", "utf-8")
    with pytest.raises(HyperGPUError, match=r"holds no \.npz or \.parquet file"):
        picture_parts(tmp_path / "texts", tmp_path / "out")
    (tmp_path / "pictures" / "a.txt").write_text("a text", "utf-8")
    with pytest.raises(HyperGPUError, match="holds 1 texts and 8 pictures"):
        picture_parts(tmp_path / "pictures", tmp_path / "out")
    settings = settings_of("program", {"parameters": {"height": 24}})
    with pytest.raises(HyperGPUError, match="only pictures have a size"):
        program_parts(Shades(), MapOrder(settings, {"x": np.ones((2, 3))}, tmp_path), tmp_path)


def test_pictures_are_refused_by_a_program_over_arrays(tmp_path: Path) -> None:
    program = forward_program(torch.nn.Linear(6, 2), {"x": np.ones((4, 6), np.float32)})
    bundles = BundleFolder(tmp_path, "program")
    bundles.add_file("program", program.program)
    bundles.add_file("tensors", program.tensors)
    bundles.add_items([{"image": "UE5H"}])
    with pytest.raises(ShardError, match="the program takes x: float32"):
        bundles.perform()
