import numpy as np
import pytest

from hypergpu.tensors.layout import (
    LARGE_MIN,
    Flat,
    Layout,
    LayoutError,
    TensorKind,
    TensorSpec,
    layout_from_json,
    layout_of,
    pack,
    unpack,
)

SPECS = (
    TensorSpec("steps", (), TensorKind.INTEGER),
    TensorSpec("norm.mean", (3,), TensorKind.STATISTIC),
    TensorSpec("bias", (7,)),
    TensorSpec("z.weight", (64, 64)),
    TensorSpec("a.weight", (5, 1024)),
)


def test_large_parameters_come_first_then_small_then_statistics_then_integers() -> None:
    names = [tensor.name for tensor in layout_of(SPECS).tensors]
    assert names == ["a.weight", "z.weight", "bias", "norm.mean", "steps"]


def test_a_parameter_of_exactly_the_minimum_is_large() -> None:
    assert TensorSpec("w", (LARGE_MIN,)).is_large
    assert not TensorSpec("w", (LARGE_MIN - 1,)).is_large


def test_counts_and_bytes_follow_from_the_shapes() -> None:
    layout = layout_of(SPECS)
    assert (layout.large_count, layout.small_count) == (5120 + 4096, 7)
    assert (layout.statistics_count, layout.integers_count) == (3, 1)
    assert layout.model_bytes == 4 * (5120 + 4096 + 7 + 3) + 8


def test_the_digest_ignores_the_order_in_which_tensors_were_named() -> None:
    assert layout_of(SPECS).digest == layout_of(reversed(SPECS)).digest


def test_the_digest_changes_with_a_shape() -> None:
    other = (*SPECS[:-1], TensorSpec("a.weight", (1024, 5)))
    assert layout_of(SPECS).digest != layout_of(other).digest


def test_json_round_trips_to_the_same_layout() -> None:
    layout = layout_of(SPECS)
    assert layout_from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"{", "not a layout"),
        (b'{"tensors":[{"name":"w","shape":[2],"kind":"gradient"}]}', "not a layout"),
        (b'{"tensors":[{"name":"w","shape":[2.5],"kind":"parameter"}]}', "not a layout"),
        (b'{"tensors":[{"name":"w","shape":[2],"kind":"parameter","x":1}]}', "not a layout"),
        (b'{"tensors":[{"name":"w","shape":[-1],"kind":"parameter"}]}', "out of bounds"),
        (b'{"tensors":[{"name":"w","shape":[68719476737],"kind":"parameter"}]}', "out of bounds"),
        (b'{"tensors":[{"name":"w","shape":[1,1,1,1,1,1,1,1,1],"kind":"integer"}]}', "dimensions"),
        (b'{"tensors":[{"name":"","shape":[1],"kind":"integer"}]}', "characters"),
        (b'{"tensors":[{"name":"\xff","shape":[1],"kind":"integer"}]}', "not a layout: .*utf-8"),
    ],
)
def test_unsound_json_is_refused_with_what_is_wrong(text: bytes, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        layout_from_json(text)


def test_json_out_of_layout_order_is_refused() -> None:
    shuffled = Layout(tuple(reversed(layout_of(SPECS).tensors)))
    with pytest.raises(LayoutError, match="layout order"):
        layout_from_json(shuffled.to_json())


def test_json_of_too_many_elements_is_refused_before_any_memory_is_taken() -> None:
    wide = Layout((TensorSpec("v", (1 << 36,)), TensorSpec("w", (1 << 36,))))
    with pytest.raises(LayoutError, match="over the limit"):
        layout_from_json(wide.to_json())


def test_json_too_long_is_refused_unread() -> None:
    with pytest.raises(LayoutError, match="over the limit"):
        layout_from_json(b" " * ((8 << 20) + 1))


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="'w' occurs twice"):
        layout_of([TensorSpec("w", (1,)), TensorSpec("w", (), TensorKind.INTEGER)])


def test_packed_tensors_unpack_to_themselves() -> None:
    layout = layout_of(SPECS)
    generator = np.random.default_rng(1)
    tensors = {spec.name: generator.integers(-9, 9, spec.shape) for spec in SPECS}
    flat = Flat.empty(layout)
    pack(layout, tensors, flat)
    unpacked = unpack(layout, flat)
    assert all(np.array_equal(unpacked[name], tensors[name]) for name in tensors)


def test_unpacked_tensors_are_views_of_a_model_blob() -> None:
    layout = layout_of(SPECS)
    blob = np.zeros(layout.model_bytes, np.uint8)
    tensors = unpack(layout, Flat.view(layout, blob))
    tensors["steps"][...] = -1
    assert blob[-8:].tolist() == [255] * 8
    assert all(np.shares_memory(tensor, blob) for tensor in tensors.values())


def test_a_blob_of_another_size_is_no_model() -> None:
    layout = layout_of(SPECS)
    with pytest.raises(LayoutError, match="bytes, not 3"):
        Flat.view(layout, np.zeros(3, np.uint8))


def test_packing_names_the_tensor_that_is_missing() -> None:
    layout = layout_of(SPECS)
    with pytest.raises(LayoutError, match=r"'a\.weight' is missing"):
        pack(layout, {}, Flat.empty(layout))


def test_packing_names_the_tensor_of_another_shape() -> None:
    layout = layout_of([TensorSpec("w", (2, 3))])
    with pytest.raises(LayoutError, match=r"'w' has shape \(3, 2\), not \(2, 3\)"):
        pack(layout, {"w": np.zeros((3, 2))}, Flat.empty(layout))
