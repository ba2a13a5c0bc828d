import numpy as np
import pytest
import torch

from hypergpu.jobfile import spec
from hypergpu.tensors.compression import RECORD, Flaw, encode_into_residual, scheme_named
from hypergpu.tensors.layout import Float32s, Octets

INTEGER_SCHEMES = ("int8", "int4")
SPARSE_SCHEMES = ("topk256", "topk64", "topk16")


def encode(name: str, values: Float32s) -> Octets:
    scheme = scheme_named(name)
    payload = np.empty(scheme.encoded_bytes(values.size), np.uint8)
    scheme.encode(values, payload)
    return payload


def round_trip(name: str, values: Float32s) -> Float32s:
    out = np.empty_like(values)
    scheme_named(name).decode(encode(name, values), out)
    return out


def noise(count: int, magnitude: float = 1.0) -> Float32s:
    values = np.random.default_rng(count).standard_normal(count, np.float32)
    return values * np.float32(magnitude)


def test_every_scheme_of_the_job_file_exists() -> None:
    assert [scheme_named(name).name for name in spec.SCHEMES] == list(spec.SCHEMES)


def test_an_unknown_scheme_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'int2': use one of fp32, bf16, int8, int4, topk256"):
        scheme_named("int2")


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
    assert scheme_named(name).encoded_bytes(RECORD) == record_bytes
    assert scheme_named(name).encoded_bytes(3 * RECORD) == 3 * record_bytes


def test_bf16_rounds_like_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    ties = np.arange(2**17, dtype=np.uint32) << 15
    values = np.concatenate((bits, ties)).view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(encode("bf16", values).view(np.int16), expected)


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-6, 1.0, 1e30])
def test_integer_schemes_are_as_good_at_any_magnitude(name: str, magnitude: float) -> None:
    ones = noise(9000)
    values = ones * np.float32(magnitude)
    error = np.linalg.norm(round_trip(name, values).astype(np.float64) - values)
    reference = np.linalg.norm(round_trip(name, ones) - ones)
    assert error / magnitude == pytest.approx(reference, rel=0.02)


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
def test_the_largest_value_of_a_block_keeps_its_place(name: str) -> None:
    values = noise(256)
    largest = int(np.abs(values).argmax())
    assert round_trip(name, values)[largest] == pytest.approx(values[largest], rel=2**-8)


@pytest.mark.parametrize("name", spec.SCHEMES)
def test_zeros_stay_zeros(name: str) -> None:
    assert not round_trip(name, np.zeros(5000, np.float32)).any()


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
def test_values_too_small_for_a_scale_become_zero(name: str) -> None:
    assert not round_trip(name, np.full(300, 1e-40, np.float32)).any()


@pytest.mark.parametrize("name", spec.SCHEMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 4999])
def test_what_is_not_finite_is_found_in_the_payload(name: str, bad: float, place: int) -> None:
    values = noise(5000)
    values[place] = bad
    assert scheme_named(name).flaw(encode(name, values), 5000) is Flaw.NOT_FINITE


def test_a_not_a_number_of_any_bits_stays_one_in_bf16() -> None:
    values = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(round_trip("bf16", values)).all()


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
def test_a_scale_whose_codes_overflow_is_not_finite(name: str) -> None:
    payload = encode(name, noise(256))
    scale_bytes = 4 if name == "int8" else 2
    largest = np.array([3e38], np.float32).view(np.uint8)
    payload[:scale_bytes] = largest[4 - scale_bytes :]
    assert scheme_named(name).flaw(payload, 256) is Flaw.NOT_FINITE


def test_feedback_brings_small_values_through_in_the_end() -> None:
    values = np.full(256, 0.01, np.float32)
    values[0] = 1.0
    scheme = scheme_named("int4")
    residual = np.zeros_like(values)
    total = np.zeros_like(values)
    for _ in range(100):
        payload = np.empty(scheme.encoded_bytes(values.size), np.uint8)
        encode_into_residual(scheme, values, residual, payload)
        decoded = np.empty_like(values)
        scheme.decode(payload, decoded)
        total += decoded
    assert np.allclose(total, 100 * values, atol=0.1)


@pytest.mark.parametrize(("name", "said"), [("topk256", 257), ("topk64", 65), ("topk16", 17)])
def test_a_short_last_record_says_the_same_share_and_at_least_one(name: str, said: int) -> None:
    scheme = scheme_named(name)
    assert np.count_nonzero(round_trip(name, noise(RECORD + 1))) == said
    assert scheme.encoded_bytes(RECORD + 1) - scheme.encoded_bytes(RECORD) == 4 + 2 + 1


@pytest.mark.parametrize("name", SPARSE_SCHEMES)
def test_a_sparse_scheme_says_more_of_a_vector_than_its_share(name: str) -> None:
    values = noise(9 * RECORD) ** 3
    left = np.linalg.norm(values - round_trip(name, values)) ** 2
    said = 1 - left / np.linalg.norm(values) ** 2
    assert said > {"topk256": 0.6, "topk64": 0.3, "topk16": 0.12}[name]


def test_one_large_value_does_not_blow_up_the_small_ones_beside_it() -> None:
    values = noise(RECORD, 1e-6)
    values[7] = 1.0
    said = round_trip("topk256", values)
    said[7] = 0
    assert np.abs(said).max() < 1e-5


@pytest.mark.parametrize("name", SPARSE_SCHEMES)
def test_a_sparse_residual_decays_and_a_dense_one_does_not(name: str) -> None:
    assert scheme_named(name).residual_decay == pytest.approx(0.95)
    assert {scheme_named(each).residual_decay for each in spec.SCHEMES[:4]} == {1.0}
