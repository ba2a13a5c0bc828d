"""The fold of updates, dense and sparse, whole and clipped."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.training.trust.weights import WHOLE
from coordinator.core.work.outer_step import PLAIN_STEP
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import (
    BaseDamagedError,
    DivergedError,
    FoldRequest,
    NoUpdatesError,
    StoredBlob,
    StoredUpdate,
)
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import CODECS, Outer
from hypergpu.tensors.codec import (
    apply_delta,
    codec_named,
    decode_parameters,
    encode_update,
    update_bytes,
)
from hypergpu.tensors.layout import Flat, Float32s, TensorSpec, layout_of
from hypergpu.tensors.records import RECORD
from hypergpu.tensors.topk import TopK
from tests.unit.aggregation.fold_files import (
    LAYOUT,
    FoldSetting,
    first_request,
    mean_of,
    model_of,
    next_request,
    random_flat,
    torch_steps,
    updates_of,
    write_blob,
)

VECTOR_BYTES = 4 * LAYOUT.parameters_count


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_model_without_large_parameters_is_folded_too(tmp_path: Path) -> None:
    small = layout_of((TensorSpec("weight", (64, 10)), TensorSpec("bias", (10,))))
    assert small.large_count == 0
    ones = np.ones(small.parameters_count, np.float32)
    request = first_request(tmp_path, [1], FoldSetting("int4", "fp32", PLAIN_STEP))
    base = write_blob(tmp_path / "small", ones.tobytes())
    updates = []
    for slot, factor in enumerate((2, 2, -1, 0)):
        flat = Flat(ones * factor, np.empty(0, np.float32), np.empty(0, np.int64))
        blob = write_blob(
            tmp_path / f"{slot}", encode_update(small, "int4", flat).payload.tobytes()
        )
        updates.append(StoredUpdate(blob.path, blob.digest, 1, "int4", WHOLE // (1 + slot)))
    request = replace(request, layout=small, base_model=base, updates=tuple(updates))
    after = np.fromfile(fold(request).model.path, np.float32)
    mean = (2 + 2 / 2 - 1 / 3 + 0) / 4
    assert np.allclose(after, 1 - mean, atol=1e-4)


@pytest.mark.parametrize("up", CODECS[:4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_exact_parameters_follow_torch_nesterov_sgd(
    up: str, momentum: float, tmp_path: Path
) -> None:
    setting = FoldSetting(up, "fp32", Outer(learning_rate=0.7, momentum=momentum))
    request = first_request(tmp_path, [30, 10, 60], setting)
    start = model_of(request.base_model.path).parameters
    result = fold(request)
    result = fold(next_request(request, result))
    mean = mean_of([update.parameters for update in updates_of(request)], [30, 10, 60])
    expected_parameters = torch_steps(start, [mean, mean], setting.outer)
    assert np.allclose(
        model_of(result.model.path).parameters, expected_parameters, rtol=1e-6, atol=1e-7
    )


def test_statistics_are_averaged_by_samples_outside_the_outer_optimizer(tmp_path: Path) -> None:
    request = first_request(tmp_path, [30, 10, 60], FoldSetting())
    result = fold(request)
    expected_statistics = mean_of(
        [update.statistics for update in updates_of(request)], [30, 10, 60]
    )
    assert np.allclose(model_of(result.model.path).statistics, expected_statistics, rtol=1e-6)


def test_integers_are_those_of_the_lowest_slot(tmp_path: Path) -> None:
    request = first_request(tmp_path, [30, 10], FoldSetting())
    integers = model_of(fold(request).model.path).integers
    assert np.array_equal(integers, updates_of(request)[0].integers)


def test_a_single_update_is_its_own_mean(tmp_path: Path) -> None:
    request = first_request(tmp_path, [7], FoldSetting("fp32", "fp32", Outer(1.0, 0.0)))
    start = model_of(request.base_model.path).parameters
    expected_parameters = start - updates_of(request)[0].parameters
    assert np.array_equal(model_of(fold(request).model.path).parameters, expected_parameters)


@pytest.mark.parametrize("down", CODECS[1:])
def test_the_delta_turns_the_held_model_into_the_next(down: str, tmp_path: Path) -> None:
    request = first_request(tmp_path, [3, 4], FoldSetting("int8", down))
    for _ in range(3):
        result = fold(request)
        assert result.delta is not None
        assert result.delta.size_bytes == update_bytes(LAYOUT, down)
        base, out = request.base_model.path, tmp_path / "applied"
        digest = apply_delta(base, result.delta.path, out, layout=LAYOUT, codec=down)
        assert digest == result.model.digest
        request = next_request(request, result)


def test_what_a_delta_leaves_unsaid_comes_with_the_next(tmp_path: Path) -> None:
    outer = Outer(learning_rate=1.0, momentum=0.0)
    request = first_request(tmp_path, [1], FoldSetting("fp32", "int4", outer))
    start = model_of(request.base_model.path).parameters
    change = updates_of(request)[0].parameters
    for _ in range(40):
        request = next_request(request, fold(request))
    held_parameters = model_of(request.base_model.path).parameters
    one_step_error = np.abs(change).max() / 7
    assert np.abs(held_parameters - (start - 40 * change)).max() < 1.1 * one_step_error


@pytest.mark.parametrize(
    ("down", "momentum", "vectors"),
    [("fp32", 0.0, 0), ("fp32", 0.9, 1), ("int4", 0.0, 1), ("int4", 0.9, 2)],
)
def test_only_the_files_that_are_of_use_are_written(
    down: str, momentum: float, vectors: int, tmp_path: Path
) -> None:
    request = first_request(tmp_path, [1, 1], FoldSetting("int8", down, Outer(0.7, momentum)))
    result = fold(request)
    state_bytes = result.outer_state.size_bytes if result.outer_state else 0
    assert state_bytes == vectors * VECTOR_BYTES
    assert (result.delta is None) == (down == "fp32")
    assert {file.path for file in result.files} == set(request.output_dir.iterdir())


def test_the_first_momentum_is_the_mean_and_the_exact_model_comes_before_it(
    tmp_path: Path,
) -> None:
    request = first_request(tmp_path, [1, 3], FoldSetting())
    result = fold(request)
    assert result.outer_state is not None
    exact, momentum = np.fromfile(result.outer_state.path, np.float32).reshape(2, -1)
    mean = mean_of([update.parameters for update in updates_of(request)], [1, 3])
    start = model_of(request.base_model.path).parameters
    assert np.allclose(momentum, mean, rtol=1e-5, atol=1e-8)
    assert np.allclose(exact, start - 0.7 * 1.9 * mean, rtol=1e-5, atol=1e-7)


def test_momentum_may_be_switched_off_and_on_between_steps(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 3], FoldSetting())
    for momentum, vectors in ((0.9, 2), (0.0, 1), (0.9, 2)):
        request = replace(request, outer=Outer(0.7, momentum))
        result = fold(request)
        assert result.outer_state is not None
        assert result.outer_state.size_bytes == vectors * VECTOR_BYTES
        request = next_request(request, result)


@pytest.mark.parametrize("setting", [FoldSetting(), FoldSetting("fp32", "fp32")])
def test_digests_and_sizes_are_those_of_the_files(setting: FoldSetting, tmp_path: Path) -> None:
    for file in fold(first_request(tmp_path, [5, 6], setting)).files:
        content = file.path.read_bytes()
        assert (file.digest, file.size_bytes) == (blake3(content).hexdigest(), len(content))


@pytest.mark.parametrize("setting", [FoldSetting(), FoldSetting("fp32", "fp32")])
def test_files_that_are_written_over_come_out_as_new_ones_do(
    setting: FoldSetting, tmp_path: Path
) -> None:
    request = first_request(tmp_path, [5, 6], setting)

    def reuse(path: Path, size_bytes: int) -> bool:
        path.write_bytes(b"\xff" * size_bytes)
        return True

    assert [file.digest for file in fold(request, reuse=reuse).files] == [
        file.digest for file in fold(request).files
    ]


def test_a_damaged_update_is_refused_and_the_others_are_folded(tmp_path: Path) -> None:
    request = first_request(tmp_path, [30, 10, 60], FoldSetting())
    flip_bit(request.updates[1].path)
    result = fold(request)
    sound = replace(request, updates=(request.updates[0], request.updates[2]))
    assert [each.index for each in result.omitted] == [1]
    assert "digest" in result.omitted[0].reason
    assert result.model.digest == fold(sound).model.digest


def test_missing_and_truncated_updates_are_refused_with_their_reasons(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 2, 3], FoldSetting())
    request.updates[0].path.unlink()
    content = request.updates[2].path.read_bytes()
    request.updates[2].path.write_bytes(content[:-1])
    omissions = fold(request).omitted
    assert [each.index for each in omissions] == [0, 2]
    assert "cannot be read" in omissions[0].reason
    assert f"{len(content) - 1} bytes on disk" in omissions[1].reason


def test_integers_come_from_the_lowest_slot_that_is_sound(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 2], FoldSetting())
    expected_integers = updates_of(request)[1].integers
    flip_bit(request.updates[0].path)
    assert np.array_equal(model_of(fold(request).model.path).integers, expected_integers)


def test_a_fold_without_updates_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoUpdatesError, match="none was given"):
        fold(first_request(tmp_path, [], FoldSetting()))


def test_a_fold_of_damaged_updates_alone_names_each(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 2], FoldSetting())
    for update in request.updates:
        flip_bit(update.path)
    with pytest.raises(NoUpdatesError, match=r"update 0: .*; update 1: "):
        fold(request)
    assert not list(request.output_dir.iterdir())


def test_a_damaged_base_model_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1], FoldSetting())
    flip_bit(request.base_model.path)
    with pytest.raises(BaseDamagedError, match="base: its bytes on disk") as failure:
        fold(request)
    assert failure.value.blob == request.base_model
    assert not list(request.output_dir.iterdir())


@pytest.mark.parametrize("setting", [FoldSetting(), FoldSetting("fp32", "fp32")])
def test_a_damaged_outer_state_is_named(setting: FoldSetting, tmp_path: Path) -> None:
    request = first_request(tmp_path, [1], setting)
    request = next_request(request, fold(request))
    assert request.outer_state is not None
    flip_bit(request.outer_state.path)
    with pytest.raises(BaseDamagedError) as failure:
        fold(request)
    assert failure.value.blob == request.outer_state


def test_a_missing_base_model_is_named(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1], FoldSetting())
    missing_blob = StoredBlob(tmp_path / "nowhere", Digest("00" * 32))
    with pytest.raises(BaseDamagedError, match="nowhere: it cannot be read"):
        fold(replace(request, base_model=missing_blob))


def test_a_model_that_left_the_range_of_floats_is_not_written(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1], FoldSetting("fp32", "int4", Outer(1e38, 0.9)))
    huge = encode_update(LAYOUT, "fp32", random_flat(9, 1e30)).payload.tobytes()
    blob = write_blob(request.updates[0].path, huge)
    update = replace(request.updates[0], digest=blob.digest)
    with pytest.raises(DivergedError, match="not finite"):
        fold(replace(request, updates=(update,)))
    assert not list(request.output_dir.iterdir())


def test_a_folder_that_cannot_be_written_is_the_callers_to_hear_of(tmp_path: Path) -> None:
    request: FoldRequest = first_request(tmp_path, [1], FoldSetting())
    with pytest.raises(FileNotFoundError):
        fold(replace(request, output_dir=tmp_path / "nowhere"))


def test_an_update_of_no_weight_is_left_out(tmp_path: Path) -> None:
    request = first_request(tmp_path, [0, 5], FoldSetting())
    result = fold(request)
    assert [(each.index, each.reason) for each in result.omitted] == [(0, "it has no weight")]
    alone = fold(replace(request, updates=request.updates[1:]))
    assert result.model.digest == alone.model.digest


PLAIN = FoldSetting("topk64", "fp32", PLAIN_STEP)


def request_with(folder: Path, vectors: list[Float32s], codec: str = "fp32") -> FoldRequest:
    """A plain step on updates of given large parameters, with one sample each."""
    request = first_request(folder, [1] * len(vectors), FoldSetting(codec, "fp32", PLAIN_STEP))
    updates: list[StoredUpdate] = []
    for slot, (update, vector) in enumerate(zip(request.updates, vectors, strict=True)):
        flat = random_flat(slot)
        flat.parameters[: LAYOUT.large_count] = vector
        payload = encode_update(LAYOUT, codec, flat).payload.tobytes()
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
    codec = codec_named(update.codec)
    assert isinstance(codec, TopK)
    payload = np.fromfile(update.path, np.uint8)
    return set(codec.entries(payload, LAYOUT.large_count).places.tolist())


def test_a_coordinate_that_one_alone_sent_is_halved(tmp_path: Path) -> None:
    request = first_request(tmp_path, [3, 1], PLAIN)
    sent_values = [flat.parameters for flat in updates_of(request)]
    first, second = places_of(request, 0), places_of(request, 1)
    change = change_of(request)
    lone, both = sorted(first - second), sorted(first & second)
    assert lone
    assert both
    assert np.allclose(change[lone], sent_values[0][lone] / 2, atol=1e-6)
    assert np.allclose(change[both], (3 * sent_values[0] + sent_values[1])[both] / 4, atol=1e-6)
    nobody = np.delete(change, sorted(first | second))
    assert not nobody.any()


def test_a_single_sparse_update_is_taken_whole(tmp_path: Path) -> None:
    request = first_request(tmp_path, [3], PLAIN)
    sent_values = updates_of(request)[0].parameters[: LAYOUT.large_count]
    assert np.allclose(change_of(request), sent_values, atol=1e-6)


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
    doubled_request = replace(request, scale=2.0)
    assert np.allclose(change_of(doubled_request), 2 * change_of(request), atol=1e-6)
    plain, twice = (model_of(fold(each).model.path) for each in (request, doubled_request))
    assert np.array_equal(plain.statistics, twice.statistics)


def clipped_request(request: FoldRequest, clips: Sequence[int]) -> FoldRequest:
    """The request with clips in 1/65,536, in slot order."""
    pairs = zip(request.updates, clips, strict=True)
    updates = tuple(replace(update, clip=clip) for update, clip in pairs)
    return replace(request, updates=updates)


def test_a_clip_shrinks_an_update_and_leaves_its_weight(tmp_path: Path) -> None:
    request = first_request(tmp_path, [3, 1], FoldSetting("fp32", "fp32", PLAIN_STEP))
    first, second = (flat.parameters for flat in updates_of(request))
    start = model_of(request.base_model.path).parameters
    request_with_clips = clipped_request(request, (WHOLE // 4, WHOLE))
    change = start - model_of(fold(request_with_clips).model.path).parameters
    assert np.allclose(change, (3 * first / 4 + second) / 4, atol=1e-6)


def test_a_clip_shrinks_a_sparse_update_against_the_weights_of_all_its_senders(
    tmp_path: Path,
) -> None:
    request = first_request(tmp_path, [3, 1], PLAIN)
    sent_values = [flat.parameters for flat in updates_of(request)]
    first, second = places_of(request, 0), places_of(request, 1)
    change = change_of(clipped_request(request, (WHOLE // 2, WHOLE)))
    lone, both = sorted(first - second), sorted(first & second)
    assert np.allclose(change[lone], sent_values[0][lone] / 4, atol=1e-6)
    assert np.allclose(change[both], (3 * sent_values[0] / 2 + sent_values[1])[both] / 4, atol=1e-6)


def test_statistics_keep_to_the_base_by_what_clips_take(tmp_path: Path) -> None:
    request = first_request(tmp_path, [3, 1], FoldSetting())
    base = model_of(request.base_model.path).statistics
    first, second = (flat.statistics for flat in updates_of(request))
    after = model_of(fold(clipped_request(request, (WHOLE // 4, WHOLE))).model.path).statistics
    shrunk_values = base + (first - base) / 4
    assert np.allclose(after, (3 * shrunk_values + second) / 4, rtol=1e-5, atol=1e-6)
    assert not np.allclose(after, model_of(fold(request).model.path).statistics, atol=0.1)


@pytest.mark.parametrize("setting", [FoldSetting(), FoldSetting(("topk64", "int8"), "topk64")])
def test_whole_clips_leave_the_bits_of_the_plain_weighted_mean(
    setting: FoldSetting, tmp_path: Path
) -> None:
    request = first_request(tmp_path, [30, 10, 60], setting)
    # As a vote of 1 in each weight: sums of 1/65,536 are exact.
    voted_updates = tuple(replace(each, weight=each.weight * WHOLE) for each in request.updates)
    request_with_clips = clipped_request(
        replace(request, updates=voted_updates), (WHOLE, WHOLE, WHOLE)
    )
    assert [file.digest for file in fold(request_with_clips).files] == [
        file.digest for file in fold(request).files
    ]


def test_an_update_that_is_clipped_to_nothing_is_left_out(tmp_path: Path) -> None:
    request = first_request(tmp_path, [5, 5], FoldSetting())
    result = fold(clipped_request(request, (0, WHOLE)))
    assert [(each.index, each.reason) for each in result.omitted] == [(0, "it has no weight")]
    alone = fold(replace(request, updates=request.updates[1:]))
    assert result.model.digest == alone.model.digest


def test_what_a_sparse_delta_leaves_unsaid_comes_with_a_later_one(tmp_path: Path) -> None:
    setting = FoldSetting("fp32", "topk256", PLAIN_STEP)
    request = first_request(tmp_path, [1], setting)
    start = model_of(request.base_model.path).parameters
    change = updates_of(request)[0].parameters
    for _ in range(80):
        request = next_request(request, fold(request))
    held_parameters = model_of(request.base_model.path).parameters
    # A coordinate is said every sixteenth round or so, and small ones wait longer.
    unsaid = np.abs(held_parameters - (start - 80 * change))
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
    growth_bytes = peak_bytes(42) - peak_bytes(3)
    assert growth_bytes < 39 * LAYOUT.large_count  # A quarter of what they would take as float32.


def test_an_update_of_one_codec_under_another_s_name_is_refused(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 1], PLAIN)
    misnamed_update = replace(request.updates[1], codec="topk16")
    omissions = fold(replace(request, updates=(request.updates[0], misnamed_update))).omitted
    assert [each.index for each in omissions] == [1]
    assert "bytes on disk" in omissions[0].reason


def test_a_residual_lives_through_a_change_of_codec_and_a_refusal() -> None:
    flat, zero = random_flat(1), random_flat(1)
    zero.parameters[:] = 0
    first = encode_update(LAYOUT, "topk64", flat)
    assert not np.array_equal(first.residual, flat.parameters)
    # Refused: what was said returns, and nothing has decayed yet.
    returned_values = first.residual + decode_parameters(LAYOUT, "topk64", first.payload)
    assert np.allclose(returned_values, flat.parameters, rtol=1e-6, atol=1e-7)
    # The next update decays it once, and only if its own codec does.
    dense = encode_update(LAYOUT, "fp32", zero, returned_values)
    assert np.array_equal(decode_parameters(LAYOUT, "fp32", dense.payload), returned_values)
    sparse = encode_update(LAYOUT, "topk64", zero, returned_values)
    total = sparse.residual + decode_parameters(LAYOUT, "topk64", sparse.payload)
    large = slice(0, LAYOUT.large_count)
    assert np.allclose(total[large], 0.95 * returned_values[large], rtol=1e-6, atol=1e-7)
