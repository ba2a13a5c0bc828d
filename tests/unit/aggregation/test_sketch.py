"""Sketches of updates: how near they keep to the vectors that they stand for."""

from pathlib import Path

import numpy as np
import pytest

from coordinator.shell.aggregation.evidence import copies
from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.likeness import distances_of
from coordinator.shell.aggregation.sketch import (
    WIDTH,
    Sketch,
    SketchKey,
    UpdateSketch,
    sketch_layers,
    sketch_rows,
    sketch_update,
    sketch_vector,
)
from hypergpu.jobfile.spec import CODECS
from hypergpu.tensors.codec import decode_update, encode_update, update_bytes
from hypergpu.tensors.layout import Flat, Float32s, Layout, TensorKind, TensorSpec, layout_of

KEY = SketchKey(b"a secret")
STANDARD_ERROR = WIDTH**-0.5
LAYOUT = layout_of(
    (
        TensorSpec("weight", (160, 512)),
        TensorSpec("bias", (301,)),
        TensorSpec("mean", (5,), TensorKind.STATISTIC),
        TensorSpec("steps", (2,), TensorKind.INTEGER),
    )
)
"""Two blocks and a half of large parameters, then small ones."""


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    one, other = first.astype(np.float64), second.astype(np.float64)
    return float((one * other).sum() / np.sqrt(np.square(one).sum() * np.square(other).sum()))


def noise(seed: int, count: int = LAYOUT.parameters_count) -> Float32s:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def sketches_of(key: SketchKey, layout: Layout, *vectors: Float32s) -> list[Sketch]:
    return [sketch_vector(key, layout, vector) for vector in vectors]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_sketches_have_the_cosine_of_their_vectors(share: float) -> None:
    first = noise(1)
    second = np.float32(share) * first + np.float32(1 - share) * noise(2)
    measured_cosine = cosine(*sketches_of(KEY, LAYOUT, first, second))
    assert measured_cosine == pytest.approx(cosine(first, second), abs=4 * STANDARD_ERROR)


@pytest.mark.parametrize("width", [10, 512, 768, 1_000, 1_024, 2_048, 4_096])
@pytest.mark.parametrize("columns", [1, 3, 40])
def test_columns_of_a_layer_are_told_apart_whatever_its_width(width: int, columns: int) -> None:
    rows = 262_144 // width
    layout = layout_of([TensorSpec("weight", (rows, width))])
    chosen_columns = np.random.default_rng(width).choice(width, min(columns, width), replace=False)
    same, turning_layer = np.zeros((2, rows, width), np.float32)
    same[:, chosen_columns] = 1
    turning_layer[:, chosen_columns] = np.where(np.arange(rows) % 2, 1, -1)[:, None]
    half = same + turning_layer  # Every other row.
    errors = []
    for secret in range(8):
        sketches = sketches_of(
            SketchKey(bytes([secret])),
            layout,
            *(each.ravel() for each in (same, turning_layer, half)),
        )
        errors += [
            cosine(sketches[0], sketches[1]) - 0.0,
            cosine(sketches[0], sketches[2]) - np.sqrt(0.5),
            cosine(sketches[1], sketches[2]) - np.sqrt(0.5),
        ]
    assert np.sqrt(np.mean(np.square(errors))) < 0.08


def test_a_sketch_has_the_length_of_its_vector_on_average() -> None:
    vector = noise(3)
    lengths = [
        np.square(sketch_vector(SketchKey(bytes([secret])), LAYOUT, vector)).sum()
        for secret in range(40)
    ]
    assert np.mean(lengths) == pytest.approx(np.square(vector, dtype=np.float64).sum(), rel=0.05)


def test_the_same_secret_gives_the_same_bits_and_another_one_others() -> None:
    vector = noise(4)
    first = sketch_vector(SketchKey(b"one"), LAYOUT, vector)
    again = sketch_vector(SketchKey(b"one"), LAYOUT, vector)
    other = sketch_vector(SketchKey(b"two"), LAYOUT, vector)
    assert first.tobytes() == again.tobytes()
    assert abs(cosine(first, other)) < 5 * STANDARD_ERROR


def flat_of(parameters: Float32s, statistics: float = 0.5) -> Flat:
    integers = np.arange(LAYOUT.integers_count)
    return Flat(parameters, np.full(LAYOUT.statistics_count, statistics, np.float32), integers)


def sketch_of(folder: Path, codec: str, flat: Flat) -> UpdateSketch:
    """The measures of an update on disk, whose node started from a model of zeros."""
    update, base = folder / "update", folder / "base"
    update.write_bytes(encode_update(LAYOUT, codec, flat).payload.tobytes())
    base.write_bytes(bytes(LAYOUT.model_bytes))
    return sketch_update(KEY, LAYOUT, codec, update, base)


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_of_each_codec_has_the_sketch_of_its_decoded_parameters(
    codec: str, tmp_path: Path
) -> None:
    sketch = sketch_of(tmp_path, codec, flat_of(noise(5)))
    decoded_parameters = decode_update(LAYOUT, codec, (tmp_path / "update").read_bytes()).parameters
    assert sketch.is_sound
    assert np.allclose(sketch.sketch, sketch_vector(KEY, LAYOUT, decoded_parameters))
    assert sketch.norm == pytest.approx(np.linalg.norm(decoded_parameters), rel=1e-4)
    assert sketch.statistics_norm == pytest.approx(0.5 * np.sqrt(5))


def test_an_update_that_overflows_a_sum_is_not_sound(tmp_path: Path) -> None:
    long = np.full(LAYOUT.parameters_count, 1e15, np.float32)
    assert sketch_of(tmp_path, "fp32", flat_of(long)).is_sound
    for value in (3e38, np.inf, np.nan):
        long[7] = value
        assert not sketch_of(tmp_path, "fp32", flat_of(long)).is_sound
    assert not sketch_of(tmp_path, "fp32", flat_of(noise(6), np.inf)).is_sound


@pytest.mark.parametrize("codec", CODECS)
def test_any_bytes_of_the_right_size_have_a_sketch(codec: str, tmp_path: Path) -> None:
    sketch_of(tmp_path, codec, flat_of(noise(7)))
    generator = np.random.default_rng(8)
    for _ in range(3):
        (tmp_path / "update").write_bytes(generator.bytes(update_bytes(LAYOUT, codec)))
        sketch = sketch_update(KEY, LAYOUT, codec, tmp_path / "update", tmp_path / "base")
        assert sketch.sketch.shape == (WIDTH,)


def test_an_update_of_another_size_is_refused(tmp_path: Path) -> None:
    sketch_of(tmp_path, "int8", flat_of(noise(9)))
    with (tmp_path / "update").open("ab") as file:
        file.write(b"x")
    with pytest.raises(OSError, match=r"update has \d+ bytes, not \d+"):
        sketch_update(KEY, LAYOUT, "int8", tmp_path / "update", tmp_path / "base")


def honest_update(seed: int, shared: Float32s) -> Float32s:
    """An update of honest work: some of it is what all others found, too."""
    vector: Float32s = shared + noise(seed)
    return vector


@pytest.mark.parametrize("error", [0.0, 0.01, 0.1])
def test_copies_are_found_also_with_noise_between_them_and_when_scaled(error: float) -> None:
    shared_part, noise_scale = noise(0), np.float32(error)
    honest = [honest_update(seed, shared_part) for seed in range(1, 8)]
    copied_updates = [3 * honest[0] + noise_scale * noise(9), honest[2] + noise_scale * noise(8)]
    assert copies(distances_of(sketches_of(KEY, LAYOUT, *honest, *copied_updates))) == [
        1,
        0,
        2,
        0,
        0,
        0,
        0,
        1,
        2,
    ]


def test_exact_copies_are_found_also_when_most_updates_are_copies() -> None:
    vectors = [noise(1), noise(2), *[noise(3)] * 5]
    assert copies(distances_of(sketches_of(KEY, LAYOUT, *vectors))) == [0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("agreement", [0.0, 1.0, 3.0])
def test_independent_work_is_no_copy_however_much_it_agrees(agreement: float) -> None:
    shared_part = np.float32(agreement) * noise(0)
    vectors = [honest_update(seed, shared_part) for seed in range(1, 8)]
    assert copies(distances_of(sketches_of(KEY, LAYOUT, *vectors))) == [0] * 7


def test_of_two_updates_none_is_called_a_copy() -> None:
    assert copies(distances_of(sketches_of(KEY, LAYOUT, noise(1), noise(1)))) == [0, 0]


def test_empty_and_overflowing_updates_are_nobodys_copies() -> None:
    empty = np.zeros(LAYOUT.parameters_count, np.float32)
    huge = np.full(LAYOUT.parameters_count, np.inf, np.float32)
    with np.errstate(invalid="ignore"):
        sketches = sketches_of(KEY, LAYOUT, empty, empty, huge, noise(1), noise(2))
    assert copies(distances_of(sketches)) == [0] * 5


def test_sketches_by_the_same_groups_can_be_compared_and_others_cannot() -> None:
    layout = layout_of(tuple(TensorSpec(name, (100, 100)) for name in ("first", "second")))
    vector, groups = noise(9, layout.parameters_count), layer_groups(layout)
    by_layers = sketch_layers(KEY, layout, vector, groups).sum(axis=0)
    assert cosine(sketch_vector(KEY, layout, vector, groups), by_layers) == pytest.approx(1)
    assert cosine(sketch_vector(KEY, layout, vector), by_layers) < 0.9


def test_vectors_that_are_sketched_at_once_have_the_bits_of_those_one_by_one() -> None:
    shapes = ((64, 300), (7,), (333, 301), (5_000,))
    layout = layout_of(TensorSpec(f"t{number}", shape) for number, shape in enumerate(shapes))
    groups = layer_groups(layout)
    rows = np.stack([noise(seed, layout.parameters_count) for seed in range(5)])
    for row, layers in zip(rows, sketch_rows(KEY, layout, rows, groups), strict=True):
        assert np.array_equal(layers, sketch_layers(KEY, layout, row, groups))
