from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace

from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.request import (
    BaseDamagedError,
    DivergedError,
    FoldRequest,
    NoUpdatesError,
    StoredBlob,
    StoredUpdate,
)
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import SCHEMES, Outer
from hypergpu.tensors.codec import apply_delta, encode_update, update_bytes
from hypergpu.tensors.layout import Flat, TensorSpec, layout_of
from hypergpu.units import Samples
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


def test_updates_of_a_model_without_large_parameters_are_compared_too(tmp_path: Path) -> None:
    small = layout_of((TensorSpec("weight", (64, 10)), TensorSpec("bias", (10,))))
    assert small.large_count == 0
    ones = np.ones(small.parameters_count, np.float32)
    request = first_request(tmp_path, [1], FoldSetting("int4"))
    base = write_blob(tmp_path / "small", ones.tobytes())
    updates = []
    for slot, factor in enumerate((2, 2, -1, 0)):
        flat = Flat(ones * factor, np.empty(0, np.float32), np.empty(0, np.int64))
        blob = write_blob(
            tmp_path / f"{slot}", encode_update(small, "int4", flat).payload.tobytes()
        )
        updates.append(StoredUpdate(blob.path, blob.digest, Samples(1), "int4"))
    request = replace(request, layout=small, base_model=base, updates=tuple(updates))
    result = fold(request)
    assert result.agreements == pytest.approx((1.0, 1.0, -1.0, 0.0))
    assert result.agreement is None


@pytest.mark.parametrize("up", SCHEMES[:4])
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
    expected = torch_steps(start, [mean, mean], setting.outer)
    assert np.allclose(model_of(result.model.path).parameters, expected, rtol=1e-6, atol=1e-7)


def test_statistics_are_averaged_by_samples_outside_the_outer_optimizer(tmp_path: Path) -> None:
    request = first_request(tmp_path, [30, 10, 60], FoldSetting())
    result = fold(request)
    expected = mean_of([update.statistics for update in updates_of(request)], [30, 10, 60])
    assert np.allclose(model_of(result.model.path).statistics, expected, rtol=1e-6)


def test_integers_are_those_of_the_lowest_slot(tmp_path: Path) -> None:
    request = first_request(tmp_path, [30, 10], FoldSetting())
    integers = model_of(fold(request).model.path).integers
    assert np.array_equal(integers, updates_of(request)[0].integers)


def test_a_single_update_is_its_own_mean(tmp_path: Path) -> None:
    request = first_request(tmp_path, [7], FoldSetting("fp32", "fp32", Outer(1.0, 0.0)))
    start = model_of(request.base_model.path).parameters
    expected = start - updates_of(request)[0].parameters
    assert np.array_equal(model_of(fold(request).model.path).parameters, expected)


@pytest.mark.parametrize("down", SCHEMES[1:])
def test_the_delta_turns_the_held_model_into_the_next(down: str, tmp_path: Path) -> None:
    request = first_request(tmp_path, [3, 4], FoldSetting("int8", down))
    for _ in range(3):
        result = fold(request)
        assert result.delta is not None
        assert result.delta.size_bytes == update_bytes(LAYOUT, down)
        base, out = request.base_model.path, tmp_path / "applied"
        digest = apply_delta(base, result.delta.path, out, layout=LAYOUT, scheme=down)
        assert digest == result.model.digest
        request = next_request(request, result)


def test_what_a_delta_leaves_unsaid_comes_with_the_next(tmp_path: Path) -> None:
    outer = Outer(learning_rate=1.0, momentum=0.0)
    request = first_request(tmp_path, [1], FoldSetting("fp32", "int4", outer))
    start = model_of(request.base_model.path).parameters
    change = updates_of(request)[0].parameters
    for _ in range(40):
        request = next_request(request, fold(request))
    held = model_of(request.base_model.path).parameters
    one_step_error = np.abs(change).max() / 7
    assert np.abs(held - (start - 40 * change)).max() < 1.1 * one_step_error


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
    omitted = fold(request).omitted
    assert [each.index for each in omitted] == [0, 2]
    assert "cannot be read" in omitted[0].reason
    assert f"{len(content) - 1} bytes on disk" in omitted[1].reason


def test_integers_come_from_the_lowest_slot_that_is_sound(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1, 2], FoldSetting())
    expected = updates_of(request)[1].integers
    flip_bit(request.updates[0].path)
    assert np.array_equal(model_of(fold(request).model.path).integers, expected)


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
    with pytest.raises(BaseDamagedError, match="base: its bytes on disk") as damaged:
        fold(request)
    assert damaged.value.blob == request.base_model
    assert not list(request.output_dir.iterdir())


@pytest.mark.parametrize("setting", [FoldSetting(), FoldSetting("fp32", "fp32")])
def test_a_damaged_outer_state_is_named(setting: FoldSetting, tmp_path: Path) -> None:
    request = first_request(tmp_path, [1], setting)
    request = next_request(request, fold(request))
    assert request.outer_state is not None
    flip_bit(request.outer_state.path)
    with pytest.raises(BaseDamagedError) as damaged:
        fold(request)
    assert damaged.value.blob == request.outer_state


def test_a_missing_base_model_is_named(tmp_path: Path) -> None:
    request = first_request(tmp_path, [1], FoldSetting())
    missing = StoredBlob(tmp_path / "nowhere", Digest("00" * 32))
    with pytest.raises(BaseDamagedError, match="nowhere: it cannot be read"):
        fold(replace(request, base_model=missing))


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


def test_an_update_of_no_samples_is_refused(tmp_path: Path) -> None:
    request = first_request(tmp_path, [0, 5], FoldSetting())
    result = fold(request)
    assert [(each.index, each.reason) for each in result.omitted] == [(0, "it has no samples")]
    alone = fold(replace(request, updates=request.updates[1:]))
    assert result.model.digest == alone.model.digest
