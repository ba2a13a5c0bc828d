"""PNG of one form, and pictures that look alike."""

import base64
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from coordinator.shell.kinds.farm.comparison import are_alike
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import ItemResult, json_results
from hypergpu.farm.map_request import ComparisonRule, ResultComparison, ResultEncoding
from hypergpu.farm.picture_likeness import are_like_pictures
from hypergpu.farm.png_images import PngError, png_bytes, png_pixels
from hypergpu.user.client.bundles import ResultView
from hypergpu.user.farm.item_rules import item_rules
from hypergpu.user.farm.output_folder import OutputFolder
from hypergpu.user.farm.output_rows import read_frame
from hypergpu.user.farm.pieces import RowContext, write_output, write_piece

Pixels = NDArray[np.uint8]


def scene(seed: int, *, size: tuple[int, int] = (96, 128)) -> Pixels:
    """A picture with large forms, as photographs have them."""
    draws = np.random.default_rng(seed)
    coarse = draws.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC)
    return np.asarray(image)


def value_of(pixels: Pixels) -> dict[str, Any]:
    return {"image": base64.b64encode(png_bytes(pixels)).decode()}


@given(width=st.integers(1, 20), height=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=50)
def test_every_reader_reads_the_pixels_that_were_written(
    width: int, height: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    content = png_bytes(pixels)
    np.testing.assert_array_equal(png_pixels(content), pixels)
    with Image.open(BytesIO(content)) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)


def other_forms() -> list[bytes]:
    """Files that are no pictures of the one form."""
    right = png_bytes(scene(1))
    grey, other_rows = BytesIO(), BytesIO()
    Image.fromarray(scene(1)[:, :, 0]).save(grey, "PNG")
    Image.fromarray(scene(1)).save(other_rows, "PNG")
    bomb = right[:33] + b"\0" * 4 + b"IDAT" + zlib.compress(b"\2" * 10_000_000) + right[-12:]
    return [b"", right[:-1], right + b"x", grey.getvalue(), other_rows.getvalue(), bomb]


@pytest.mark.parametrize("number", range(6))
def test_other_files_are_refused(number: int) -> None:
    with pytest.raises(PngError):
        png_pixels(other_forms()[number])


def test_a_body_larger_than_its_head_states_is_not_unpacked() -> None:
    width, height = 8, 8
    small = png_bytes(np.zeros((height, width, 3), np.uint8))
    body = zlib.compress(b"\2" * 50_000_000)
    checksum = zlib.crc32(b"IDAT" + body).to_bytes(4, "big")
    content = small[:33] + len(body).to_bytes(4, "big") + b"IDAT" + body + checksum + small[-12:]
    with pytest.raises(PngError, match="no image of the stated size"):
        png_pixels(content)


def test_pictures_of_other_rounding_are_alike_and_others_are_not() -> None:
    one = scene(1)
    draws = np.random.default_rng(5)
    noise = draws.normal(0, 6, one.shape)
    near = (one + noise).clip(0, 255).astype(np.uint8)
    grey = np.full_like(one, int(one.mean()))
    assert are_like_pictures(value_of(one), value_of(near))
    for other in (scene(2), grey, 255 - one, one[:, ::-1], one[:48]):
        assert not are_like_pictures(value_of(one), value_of(np.ascontiguousarray(other)))
        assert not are_like_pictures(value_of(np.ascontiguousarray(other)), value_of(one))
    assert not are_like_pictures(value_of(one), {"image": "no picture"})
    assert not are_like_pictures(value_of(one), None)


def test_results_of_pictures_agree_by_the_share_of_items() -> None:
    comparison = ResultComparison(ComparisonRule.PICTURES)
    values = [ItemResult(value_of(scene(number))) for number in range(3)]
    near = [ItemResult(value_of(scene(number) // 8 * 8)) for number in range(3)]
    wrong = [*near[:2], ItemResult(value_of(scene(8)))]
    without = [*near[:2], ItemResult(error="no")]

    def agree(other: list[ItemResult]) -> bool:
        contents = json_results(values), json_results(other)
        return are_alike(*contents, ResultEncoding.JSONL, 3, comparison)

    assert agree(near)
    assert not agree(wrong)
    assert not agree(without)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_pictures_become_files_beside_the_output(tmp_path: Path, suffix: str) -> None:
    folder = OutputFolder(tmp_path / f"art{suffix}")
    folder.begin(may_resume=False, may_overwrite=False)
    context = RowContext([], {}, 0)
    for start, numbers in ((2, (3,)), (0, (1, 2))):
        results = [ItemResult(value_of(scene(number))) for number in numbers]
        content = json_results(results if start else [results[0], ItemResult(error="refused")])
        view = ResultView(start, len(numbers), digest_of(content), len(content), "0x1", 1, 0, 1)
        write_piece(folder, item_rules("image"), context, view, content)
    folder.publish_pictures()
    assert write_output(folder) == 1
    folder.remove()
    rows = read_frame(folder.out)
    assert rows["image"].tolist()[::2] == ["art.pictures/000000.png", "art.pictures/000002.png"]
    assert sorted(path.name for path in folder.pictures_out.iterdir()) == [
        "000000.png",
        "000002.png",
    ]
    with Image.open(tmp_path / rows["image"][2]) as image:
        np.testing.assert_array_equal(np.asarray(image), scene(3))
    folder.out.unlink()
    with pytest.raises(HyperGPUError, match=r"art\.pictures is there already"):
        OutputFolder(folder.out).begin(may_resume=False, may_overwrite=False)


def test_a_node_that_sends_no_picture_is_told_to_the_user(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "art.jsonl")
    folder.begin(may_resume=False, may_overwrite=False)
    content = json_results([ItemResult({"image": "UE5H"})])
    view = ResultView(0, 1, digest_of(content), len(content), "0x1", 1, 0, 1)
    with pytest.raises(HyperGPUError, match="the result of item 0 is no picture: it is no PNG"):
        write_piece(folder, item_rules("image"), RowContext([], {}, 0), view, content)
