"""Layouts and codecs of tensors; tests/vectors fixes the bytes of each codec."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import spec
from hypergpu.jobfile.spec import CODECS
from hypergpu.tensors.codec import (
    ApplyError,
    IncrementalCheck,
    apply_delta,
    codec_named,
    decode_parameters,
    decode_update,
    encode_into_residual,
    encode_update,
    sections_of,
    update_bytes,
)
from hypergpu.tensors.layout import (
    LARGE_MIN,
    Flat,
    Float32s,
    Layout,
    LayoutError,
    Octets,
    TensorKind,
    TensorSpec,
    layout_from_json,
    layout_of,
    pack,
    unpack,
)
from hypergpu.tensors.records import RECORD, Flaw

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
    shuffled_layout = Layout(tuple(reversed(layout_of(SPECS).tensors)))
    with pytest.raises(LayoutError, match="layout order"):
        layout_from_json(shuffled_layout.to_json())


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
    unpacked_tensors = unpack(layout, flat)
    assert all(np.array_equal(unpacked_tensors[name], tensors[name]) for name in tensors)


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


INTEGER_CODECS = ("int8", "int4")
SPARSE_CODECS = ("topk256", "topk64", "topk16")


def encode(name: str, values: Float32s) -> Octets:
    codec = codec_named(name)
    payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
    codec.encode(values, payload)
    return payload


def round_trip(name: str, values: Float32s) -> Float32s:
    out = np.empty_like(values)
    codec_named(name).decode(encode(name, values), out)
    return out


def noise(count: int, magnitude: float = 1.0) -> Float32s:
    values = np.random.default_rng(count).standard_normal(count, np.float32)
    return values * np.float32(magnitude)


def test_every_codec_of_the_job_file_exists() -> None:
    assert [codec_named(name).name for name in spec.CODECS] == list(spec.CODECS)


def test_an_unknown_codec_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'int2': use one of fp32, bf16, int8, int4, topk256"):
        codec_named("int2")


@pytest.mark.parametrize(
    ("name", "record_bytes"),
    [
        ("fp32", 16384),
        ("bf16", 8192),
        ("int8", 4100),
        ("int4", 2080),
        ("topk256", 4 + 384 + 128),
        ("topk64", 4 + 96 + 16),
        ("topk16", 4 + 24 + 4),
    ],
)
def test_a_full_record_has_the_documented_size(name: str, record_bytes: int) -> None:
    assert codec_named(name).encoded_bytes(RECORD) == record_bytes
    assert codec_named(name).encoded_bytes(3 * RECORD) == 3 * record_bytes


def test_bf16_rounds_like_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    ties = np.arange(2**17, dtype=np.uint32) << 15
    values = np.concatenate((bits, ties)).view(np.float32)
    values = values[np.isfinite(values)]
    expected_codes = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(encode("bf16", values).view(np.int16), expected_codes)


@pytest.mark.parametrize("name", INTEGER_CODECS)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-6, 1.0, 1e30])
def test_integer_codecs_are_as_good_at_any_magnitude(name: str, magnitude: float) -> None:
    ones = noise(9000)
    values = ones * np.float32(magnitude)
    error = np.linalg.norm(round_trip(name, values).astype(np.float64) - values)
    reference = np.linalg.norm(round_trip(name, ones) - ones)
    assert error / magnitude == pytest.approx(reference, rel=0.02)


@pytest.mark.parametrize("name", INTEGER_CODECS)
def test_the_largest_value_of_a_block_keeps_its_place(name: str) -> None:
    values = noise(256)
    largest = int(np.abs(values).argmax())
    assert round_trip(name, values)[largest] == pytest.approx(values[largest], rel=2**-8)


@pytest.mark.parametrize("name", spec.CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    assert not round_trip(name, np.zeros(5000, np.float32)).any()


@pytest.mark.parametrize("name", INTEGER_CODECS)
def test_values_too_small_for_a_scale_become_zero(name: str) -> None:
    assert not round_trip(name, np.full(300, 1e-40, np.float32)).any()


@pytest.mark.parametrize("name", spec.CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 4999])
def test_what_is_not_finite_is_found_in_the_payload(name: str, bad: float, place: int) -> None:
    values = noise(5000)
    values[place] = bad
    assert codec_named(name).flaw(encode(name, values), 5000) is Flaw.NOT_FINITE


def test_a_not_a_number_of_any_bits_stays_one_in_bf16() -> None:
    values = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(round_trip("bf16", values)).all()


@pytest.mark.parametrize("name", INTEGER_CODECS)
def test_a_scale_whose_codes_overflow_is_not_finite(name: str) -> None:
    payload = encode(name, noise(256))
    scale_bytes = 4 if name == "int8" else 2
    largest = np.array([3e38], np.float32).view(np.uint8)
    payload[:scale_bytes] = largest[4 - scale_bytes :]
    assert codec_named(name).flaw(payload, 256) is Flaw.NOT_FINITE


def test_feedback_brings_small_values_through_in_the_end() -> None:
    values = np.full(256, 0.01, np.float32)
    values[0] = 1.0
    codec = codec_named("int4")
    residual = np.zeros_like(values)
    total = np.zeros_like(values)
    for _ in range(100):
        payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
        encode_into_residual(codec, values, residual, payload)
        decoded_values = np.empty_like(values)
        codec.decode(payload, decoded_values)
        total += decoded_values
    assert np.allclose(total, 100 * values, atol=0.1)


@pytest.mark.parametrize(("name", "said"), [("topk256", 257), ("topk64", 65), ("topk16", 17)])
def test_a_short_last_record_says_the_same_share_and_at_least_one(name: str, said: int) -> None:
    codec = codec_named(name)
    assert np.count_nonzero(round_trip(name, noise(RECORD + 1))) == said
    assert codec.encoded_bytes(RECORD + 1) - codec.encoded_bytes(RECORD) == 4 + 2 + 1


@pytest.mark.parametrize("name", SPARSE_CODECS)
def test_a_sparse_codec_says_more_of_a_vector_than_its_share(name: str) -> None:
    values = noise(9 * RECORD) ** 3
    left_energy = np.linalg.norm(values - round_trip(name, values)) ** 2
    sent_share = 1 - left_energy / np.linalg.norm(values) ** 2
    assert sent_share > {"topk256": 0.6, "topk64": 0.3, "topk16": 0.12}[name]


def test_one_large_value_does_not_blow_up_the_small_ones_beside_it() -> None:
    values = noise(RECORD, 1e-6)
    values[7] = 1.0
    decoded_values = round_trip("topk256", values)
    decoded_values[7] = 0
    assert np.abs(decoded_values).max() < 1e-5


@pytest.mark.parametrize("name", SPARSE_CODECS)
def test_a_sparse_residual_decays_and_a_dense_one_does_not(name: str) -> None:
    assert codec_named(name).residual_decay == pytest.approx(0.95)
    assert {codec_named(each).residual_decay for each in spec.CODECS[:4]} == {1.0}


LAYOUT = layout_of(
    (
        TensorSpec("weight", (37, 301)),
        TensorSpec("bias", (301,)),
        TensorSpec("mean", (5,), TensorKind.STATISTIC),
        TensorSpec("steps", (2,), TensorKind.INTEGER),
    )
)


def update(seed: int = 0) -> Flat:
    generator = np.random.default_rng(seed)
    return Flat(
        generator.standard_normal(LAYOUT.parameters_count, np.float32),
        generator.standard_normal(LAYOUT.statistics_count, np.float32),
        generator.integers(-(2**62), 2**62, LAYOUT.integers_count),
    )


@pytest.mark.parametrize(
    ("codec", "expected_bytes"),
    [
        ("fp32", 4 * 11137 + 4 * 301 + 20 + 16),
        ("bf16", 2 * 11137 + 2 * 301 + 20 + 16),
        ("int8", 11137 + 3 * 4 + 2 * 301 + 20 + 16),
        ("int4", 44 * 130 + 2 * 301 + 20 + 16),
        ("topk256", 2 * 516 + (4 + 278 + 93) + 2 * 301 + 20 + 16),
        ("topk64", 2 * 116 + (4 + 71 + 12) + 2 * 301 + 20 + 16),
        ("topk16", 2 * 32 + (4 + 18 + 3) + 2 * 301 + 20 + 16),
    ],
)
def test_an_update_has_the_size_of_its_sections(codec: str, expected_bytes: int) -> None:
    assert update_bytes(LAYOUT, codec) == expected_bytes
    assert encode_update(LAYOUT, codec, update()).payload.size == expected_bytes


@pytest.mark.parametrize("codec", spec.CODECS)
def test_statistics_and_integers_travel_exactly(codec: str) -> None:
    sent_update = update()
    received_update = decode_update(
        LAYOUT, codec, encode_update(LAYOUT, codec, sent_update).payload
    )
    assert np.array_equal(received_update.statistics, sent_update.statistics)
    assert np.array_equal(received_update.integers, sent_update.integers)


@pytest.mark.parametrize("codec", spec.CODECS)
def test_what_an_update_says_and_its_residual_make_the_pseudo_gradient(codec: str) -> None:
    sent_update = update()
    encoded_update = encode_update(LAYOUT, codec, sent_update)
    decoded_parameters = decode_parameters(LAYOUT, codec, encoded_update.payload.tobytes())
    assert np.allclose(
        decoded_parameters + encoded_update.residual, sent_update.parameters, rtol=2e-7, atol=0
    )


@pytest.mark.parametrize("codec", spec.CODECS)
def test_a_residual_is_said_with_the_next_update(codec: str) -> None:
    sent_update, residual = update(), update(1).parameters
    payload = encode_update(LAYOUT, codec, sent_update, residual).payload
    decayed_residual = residual.copy()
    decayed_residual[:11137] *= np.float32(codec_named(codec).residual_decay)
    both = sent_update._replace(parameters=sent_update.parameters + decayed_residual)
    assert np.array_equal(payload, encode_update(LAYOUT, codec, both).payload)


def test_encoding_changes_neither_pseudo_gradient_nor_residual() -> None:
    sent_update, residual = update(), update(1).parameters
    encode_update(LAYOUT, "int4", sent_update, residual)
    assert np.array_equal(sent_update.parameters, update().parameters)
    assert np.array_equal(residual, update(1).parameters)


def test_an_update_whose_places_do_not_ascend_is_malformed() -> None:
    payload = encode_update(LAYOUT, "topk64", update()).payload
    payload[4:7] = 0  # The first two places of the first record: both 0.
    with pytest.raises(HyperGPUError, match="do not ascend") as refusal:
        IncrementalCheck(LAYOUT, "topk64").feed(payload.tobytes())
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


def test_a_place_past_the_end_of_a_short_record_is_malformed() -> None:
    payload = encode_update(LAYOUT, "topk16", update()).payload
    last_places = slice(64 + 4, 64 + 4 + 18)  # 12 places of the last record, 2,945 values long.
    payload[last_places.stop - 1] = 0xFF
    with pytest.raises(HyperGPUError) as refusal:
        IncrementalCheck(LAYOUT, "topk16").feed(payload.tobytes())
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


@pytest.mark.parametrize("change_bytes", [-1, 1])
def test_an_update_of_the_wrong_size_is_not_decoded(change_bytes: int) -> None:
    payload = b"\0" * (update_bytes(LAYOUT, "int8") + change_bytes)
    with pytest.raises(HyperGPUError) as refusal:
        decode_update(LAYOUT, "int8", payload)
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


@pytest.mark.parametrize("codec", spec.CODECS)
def test_the_check_refuses_a_byte_too_many_at_once(codec: str) -> None:
    check = IncrementalCheck(LAYOUT, codec)
    check.feed(encode_update(LAYOUT, codec, update()).payload.tobytes())
    with pytest.raises(HyperGPUError) as refusal:
        check.feed(b"\0")
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


@pytest.mark.parametrize("codec", spec.CODECS)
def test_the_check_refuses_an_early_end(codec: str) -> None:
    check = IncrementalCheck(LAYOUT, codec)
    check.feed(encode_update(LAYOUT, codec, update()).payload.tobytes()[:-1])
    with pytest.raises(HyperGPUError) as refusal:
        check.finish()
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


@pytest.mark.parametrize("codec", spec.CODECS)
def test_any_integers_are_finite(codec: str) -> None:
    sent_update = update()._replace(integers=np.array([-1, 2**63 - 1]))
    check = IncrementalCheck(LAYOUT, codec)
    check.feed(encode_update(LAYOUT, codec, sent_update).payload.tobytes())
    check.finish()


@pytest.mark.parametrize("codec", spec.CODECS[1:])
def test_a_delta_adds_to_parameters_and_replaces_the_rest(codec: str, tmp_path: Path) -> None:
    base, change = update(), update(1)
    payload = encode_update(LAYOUT, codec, change).payload
    paths = [tmp_path / name for name in ("base", "delta", "out")]
    paths[0].write_bytes(b"".join(vector.tobytes() for vector in base))
    paths[1].write_bytes(payload.tobytes())
    digest = apply_delta(*paths, layout=LAYOUT, codec=codec)
    parameters = base.parameters + decode_parameters(LAYOUT, codec, payload)
    expected_bytes = b"".join(vector.tobytes() for vector in change._replace(parameters=parameters))
    assert paths[2].read_bytes() == expected_bytes
    assert digest == blake3(expected_bytes).hexdigest()


def test_a_delta_of_another_size_is_not_applied(tmp_path: Path) -> None:
    base, delta, out = (tmp_path / name for name in ("base", "delta", "out"))
    base.write_bytes(b"\0" * LAYOUT.model_bytes)
    delta.write_bytes(b"\0")
    with pytest.raises(ApplyError, match="delta has 1 bytes"):
        apply_delta(base, delta, out, layout=LAYOUT, codec="int4")
    assert not out.exists()


@pytest.mark.parametrize("codec", spec.CODECS)
def test_a_refused_update_of_any_bytes_can_be_read_back(codec: str) -> None:
    payload = b"\xff" * update_bytes(LAYOUT, codec)
    assert decode_parameters(LAYOUT, codec, payload).size == LAYOUT.parameters_count


def test_sections_follow_each_other_without_gaps() -> None:
    sections = sections_of(LAYOUT, "int4")
    assert sections.large.bytes_start == 0
    assert sections.large.bytes.stop == sections.small.bytes.start
    assert sections.small.bytes.stop == sections.statistics.bytes.start
    assert sections.statistics.bytes.stop == sections.integers.start


VECTORS = Path(__file__).parents[2] / "vectors" / "updates.json"
FIXED_LAYOUT = layout_of(
    (
        TensorSpec("weight", (300, 317)),
        TensorSpec("bias", (317,)),
        TensorSpec("mean", (3,), TensorKind.STATISTIC),
        TensorSpec("steps", (), TensorKind.INTEGER),
    )
)


def dyadic_values(count: int) -> Flat:
    """Values from raw bits alone, so that no library's mathematics is part of the vector."""
    bits = np.random.Philox(key=7).random_raw(count)
    mantissas = (bits & 0xFFFFFF).astype(np.float32) - np.float32(2**23)
    exponents = -((bits >> 24) % 40).astype(np.int32)
    values = np.ldexp(mantissas, exponents)
    return Flat(values, np.array([0.5, -2.0, 3.0], np.float32), np.array([41], np.int64))


def test_the_layout_s_digest_is_the_recorded_one() -> None:
    recorded_digests = msgspec.json.decode(VECTORS.read_bytes(), type=dict[str, str])
    assert FIXED_LAYOUT.digest == recorded_digests["layout"]


@pytest.mark.parametrize("codec", CODECS)
def test_an_update_s_bytes_are_the_recorded_ones(codec: str) -> None:
    recorded_digests = msgspec.json.decode(VECTORS.read_bytes(), type=dict[str, str])
    encoded_update = encode_update(
        FIXED_LAYOUT, codec, dyadic_values(FIXED_LAYOUT.parameters_count)
    )
    assert blake3(encoded_update.payload.data).hexdigest() == recorded_digests[codec]
    assert (
        blake3(encoded_update.residual.view(np.uint8).data).hexdigest()
        == recorded_digests[f"{codec} left"]
    )
