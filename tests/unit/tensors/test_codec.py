from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import spec
from hypergpu.tensors.codec import (
    ApplyError,
    IncrementalCheck,
    apply_delta,
    decode_parameters,
    decode_update,
    encode_update,
    sections_of,
    update_bytes,
)
from hypergpu.tensors.compression import scheme_named
from hypergpu.tensors.layout import Flat, TensorKind, TensorSpec, layout_of

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
    ("scheme", "expected_bytes"),
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
def test_an_update_has_the_size_of_its_sections(scheme: str, expected_bytes: int) -> None:
    assert update_bytes(LAYOUT, scheme) == expected_bytes
    assert encode_update(LAYOUT, scheme, update()).payload.size == expected_bytes


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_statistics_and_integers_travel_exactly(scheme: str) -> None:
    sent = update()
    received = decode_update(LAYOUT, scheme, encode_update(LAYOUT, scheme, sent).payload)
    assert np.array_equal(received.statistics, sent.statistics)
    assert np.array_equal(received.integers, sent.integers)


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_what_an_update_says_and_its_residual_make_the_pseudo_gradient(scheme: str) -> None:
    sent = update()
    encoded = encode_update(LAYOUT, scheme, sent)
    said = decode_parameters(LAYOUT, scheme, encoded.payload.tobytes())
    assert np.allclose(said + encoded.residual, sent.parameters, rtol=2e-7, atol=0)


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_a_residual_is_said_with_the_next_update(scheme: str) -> None:
    sent, residual = update(), update(1).parameters
    payload = encode_update(LAYOUT, scheme, sent, residual).payload
    decayed = residual.copy()
    decayed[:11137] *= np.float32(scheme_named(scheme).residual_decay)
    both = sent._replace(parameters=sent.parameters + decayed)
    assert np.array_equal(payload, encode_update(LAYOUT, scheme, both).payload)


def test_encoding_changes_neither_pseudo_gradient_nor_residual() -> None:
    sent, residual = update(), update(1).parameters
    encode_update(LAYOUT, "int4", sent, residual)
    assert np.array_equal(sent.parameters, update().parameters)
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


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_the_check_refuses_a_byte_too_many_at_once(scheme: str) -> None:
    check = IncrementalCheck(LAYOUT, scheme)
    check.feed(encode_update(LAYOUT, scheme, update()).payload.tobytes())
    with pytest.raises(HyperGPUError) as refusal:
        check.feed(b"\0")
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_the_check_refuses_an_early_end(scheme: str) -> None:
    check = IncrementalCheck(LAYOUT, scheme)
    check.feed(encode_update(LAYOUT, scheme, update()).payload.tobytes()[:-1])
    with pytest.raises(HyperGPUError) as refusal:
        check.finish()
    assert refusal.value.reason is Reason.UPDATE_MALFORMED


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_any_integers_are_finite(scheme: str) -> None:
    sent = update()._replace(integers=np.array([-1, 2**63 - 1]))
    check = IncrementalCheck(LAYOUT, scheme)
    check.feed(encode_update(LAYOUT, scheme, sent).payload.tobytes())
    check.finish()


@pytest.mark.parametrize("scheme", spec.SCHEMES[1:])
def test_a_delta_adds_to_parameters_and_replaces_the_rest(scheme: str, tmp_path: Path) -> None:
    base, change = update(), update(1)
    payload = encode_update(LAYOUT, scheme, change).payload
    paths = [tmp_path / name for name in ("base", "delta", "out")]
    paths[0].write_bytes(b"".join(vector.tobytes() for vector in base))
    paths[1].write_bytes(payload.tobytes())
    digest = apply_delta(*paths, layout=LAYOUT, scheme=scheme)
    parameters = base.parameters + decode_parameters(LAYOUT, scheme, payload)
    expected = b"".join(vector.tobytes() for vector in change._replace(parameters=parameters))
    assert paths[2].read_bytes() == expected
    assert digest == blake3(expected).hexdigest()


def test_a_delta_of_another_size_is_not_applied(tmp_path: Path) -> None:
    base, delta, out = (tmp_path / name for name in ("base", "delta", "out"))
    base.write_bytes(b"\0" * LAYOUT.model_bytes)
    delta.write_bytes(b"\0")
    with pytest.raises(ApplyError, match="delta has 1 bytes"):
        apply_delta(base, delta, out, layout=LAYOUT, scheme="int4")
    assert not out.exists()


@pytest.mark.parametrize("scheme", spec.SCHEMES)
def test_a_refused_update_of_any_bytes_can_be_read_back(scheme: str) -> None:
    payload = b"\xff" * update_bytes(LAYOUT, scheme)
    assert decode_parameters(LAYOUT, scheme, payload).size == LAYOUT.parameters_count


def test_sections_follow_each_other_without_gaps() -> None:
    sections = sections_of(LAYOUT, "int4")
    assert sections.large.bytes_start == 0
    assert sections.large.bytes.stop == sections.small.bytes.start
    assert sections.small.bytes.stop == sections.statistics.bytes.start
    assert sections.statistics.bytes.stop == sections.integers.start
