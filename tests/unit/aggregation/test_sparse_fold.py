import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.request import PLAIN_STEP, FoldRequest, StoredUpdate
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.compression import RECORD, TopK, scheme_named
from hypergpu.tensors.layout import Float32s
from tests.unit.aggregation.fold_files import (
    LAYOUT,
    FoldSetting,
    first_request,
    model_of,
    next_request,
    random_flat,
    updates_of,
    write_blob,
)

PLAIN = FoldSetting("topk64", "fp32", PLAIN_STEP)


def request_with(folder: Path, vectors: list[Float32s], scheme: str = "fp32") -> FoldRequest:
    """A plain step on updates of given large parameters, with one sample each."""
    request = first_request(folder, [1] * len(vectors), FoldSetting(scheme, "fp32", PLAIN_STEP))
    updates: list[StoredUpdate] = []
    for slot, (update, vector) in enumerate(zip(request.updates, vectors, strict=True)):
        flat = random_flat(slot)
        flat.parameters[: LAYOUT.large_count] = vector
        payload = encode_update(LAYOUT, scheme, flat).payload.tobytes()
        digest = write_blob(update.path, payload).digest
        updates.append(replace(update, digest=digest))
    return replace(request, updates=tuple(updates))


def change_of(request: FoldRequest) -> Float32s:
    """What a fold takes from the large parameters."""
    start = model_of(request.base_model.path).parameters
    change: Float32s = start - model_of(fold(request).model.path).parameters
    return change[: LAYOUT.large_count]


def places_of(request: FoldRequest, slot: int) -> set[int]:
    update = request.updates[slot]
    scheme = scheme_named(update.scheme)
    assert isinstance(scheme, TopK)
    payload = np.fromfile(update.path, np.uint8)
    return set(scheme.entries(payload, LAYOUT.large_count).places.tolist())


def test_a_coordinate_that_one_alone_sent_is_halved(tmp_path: Path) -> None:
    request = first_request(tmp_path, [3, 1], PLAIN)
    said = [flat.parameters for flat in updates_of(request)]
    first, second = places_of(request, 0), places_of(request, 1)
    change = change_of(request)
    lone, both = sorted(first - second), sorted(first & second)
    assert lone
    assert both
    assert np.allclose(change[lone], said[0][lone] / 2, atol=1e-6)
    assert np.allclose(change[both], (3 * said[0] + said[1])[both] / 4, atol=1e-6)
    nobody = np.delete(change, sorted(first | second))
    assert not nobody.any()


def test_a_single_sparse_update_is_taken_whole(tmp_path: Path) -> None:
    request = first_request(tmp_path, [3], PLAIN)
    said = updates_of(request)[0].parameters[: LAYOUT.large_count]
    assert np.allclose(change_of(request), said, atol=1e-6)


def test_a_zero_that_was_sent_counts_as_sent(tmp_path: Path) -> None:
    ones = np.zeros(LAYOUT.large_count, np.float32)
    ones[:32] = 1.0
    zeros = np.zeros_like(ones)  # Says zero of the first 64 places of each record.
    change = change_of(request_with(tmp_path, [ones, zeros], "topk64"))
    assert np.allclose(change[:32], 0.5, atol=1e-6)
    three = change_of(request_with(tmp_path, [ones, zeros, zeros], "topk64"))
    assert np.allclose(three[:32], 1 / 3, atol=1e-6)


def test_a_plain_step_drops_momentum_and_the_next_starts_without(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 3], FoldSetting())
    request = next_request(request, fold(request))
    plain = fold(replace(request, outer=PLAIN_STEP))
    assert plain.outer_state is not None
    assert plain.outer_state.size_bytes == 4 * LAYOUT.parameters_count
    request = next_request(request, plain)
    exact = np.fromfile(plain.outer_state.path, np.float32)
    result = fold(request)
    assert result.outer_state is not None
    after, momentum = np.fromfile(result.outer_state.path, np.float32).reshape(2, -1)
    assert np.allclose(exact - after, 0.7 * 1.9 * momentum, atol=1e-6)


def test_the_scale_multiplies_parameters_and_not_statistics(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 3], FoldSetting("int4", "fp32", PLAIN_STEP))
    doubled = replace(request, scale=2.0)
    assert np.allclose(change_of(doubled), 2 * change_of(request), atol=1e-6)
    plain, twice = (model_of(fold(each).model.path) for each in (request, doubled))
    assert np.array_equal(plain.statistics, twice.statistics)


def agreement_of(folder: Path, vectors: list[Float32s]) -> float | None:
    return fold(request_with(folder, vectors)).agreement


def test_equal_updates_agree_as_many_times_as_they_are(tmp_path: Path) -> None:
    vector = random_flat(3).parameters[: LAYOUT.large_count]
    assert agreement_of(tmp_path, [vector] * 5) == pytest.approx(5.0)


def test_updates_that_cancel_do_not_agree(tmp_path: Path) -> None:
    vector = random_flat(3).parameters[: LAYOUT.large_count]
    assert agreement_of(tmp_path, [vector, -vector]) == pytest.approx(0.0)


def test_independent_updates_agree_about_once(tmp_path: Path) -> None:
    vectors = [random_flat(seed).parameters[: LAYOUT.large_count] for seed in range(4)]
    assert agreement_of(tmp_path, vectors) == pytest.approx(1.0, abs=0.1)


def test_the_agreement_is_that_of_equal_weights(tmp_path: Path) -> None:
    vectors = [random_flat(seed).parameters[: LAYOUT.large_count] for seed in (1, 1, 2)]
    request = request_with(tmp_path, vectors)
    weighted = tuple(
        replace(update, samples=samples)
        for update, samples in zip(request.updates, (1, 50, 9), strict=True)
    )
    other = replace(request, updates=weighted)
    assert fold(other).agreement == fold(request).agreement
    # |2a + b|^2 / (2|a|^2 + |b|^2) of orthogonal vectors of one length.
    assert fold(request).agreement == pytest.approx(5 / 3, abs=0.1)


@pytest.mark.parametrize("count", [1, 2])
def test_one_update_or_none_that_says_anything_has_no_agreement(count: int, tmp_path: Path) -> None:
    zeros = np.zeros(LAYOUT.large_count, np.float32)
    assert agreement_of(tmp_path, [zeros] * count) is None
    ones = [zeros + 1] * count
    assert (agreement_of(tmp_path, ones) is None) == (count == 1)


def test_what_a_sparse_delta_leaves_unsaid_comes_with_a_later_one(tmp_path: Path) -> None:
    setting = FoldSetting("fp32", "topk256", PLAIN_STEP)
    request = first_request(tmp_path, [1], setting)
    start = model_of(request.base_model.path).parameters
    change = updates_of(request)[0].parameters
    for _ in range(80):
        request = next_request(request, fold(request))
    held = model_of(request.base_model.path).parameters
    # A coordinate is said every sixteenth round or so, and small ones wait longer.
    unsaid = np.abs(held - (start - 80 * change))
    assert unsaid.max() < 40 * np.abs(change).max()
    assert np.linalg.norm(unsaid) < 0.25 * np.linalg.norm(80 * change)


def test_memory_does_not_grow_with_the_number_of_sparse_updates(tmp_path: Path) -> None:
    def peak_bytes(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        request = first_request(folder, [1] * count, FoldSetting(("topk64", "int4"), "topk64"))
        tracemalloc.start()
        try:
            fold(request, span=RECORD)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(2)  # What is made once for the whole process.
    grown = peak_bytes(42) - peak_bytes(3)
    assert grown < 39 * LAYOUT.large_count  # A quarter of what they would take as float32.


def test_an_update_of_one_scheme_under_another_s_name_is_refused(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 1], PLAIN)
    misnamed = replace(request.updates[1], scheme="topk16")
    omitted = fold(replace(request, updates=(request.updates[0], misnamed))).omitted
    assert [each.index for each in omitted] == [1]
    assert "bytes on disk" in omitted[0].reason


def test_a_residual_lives_through_a_change_of_scheme_and_a_refusal() -> None:
    flat, zero = random_flat(1), random_flat(1)
    zero.parameters[:] = 0
    first = encode_update(LAYOUT, "topk64", flat)
    assert not np.array_equal(first.residual, flat.parameters)
    # Refused: what was said returns, and nothing has decayed yet.
    returned = first.residual + decode_parameters(LAYOUT, "topk64", first.payload)
    assert np.allclose(returned, flat.parameters, rtol=1e-6, atol=1e-7)
    # The next update decays it once, and only if its own scheme does.
    dense = encode_update(LAYOUT, "fp32", zero, returned)
    assert np.array_equal(decode_parameters(LAYOUT, "fp32", dense.payload), returned)
    sparse = encode_update(LAYOUT, "topk64", zero, returned)
    total = sparse.residual + decode_parameters(LAYOUT, "topk64", sparse.payload)
    large = slice(0, LAYOUT.large_count)
    assert np.allclose(total[large], 0.95 * returned[large], rtol=1e-6, atol=1e-7)
