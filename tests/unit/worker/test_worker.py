"""The worker's training: schedules, shards that begin early, slow devices, failures, limits."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import nn

from gpu_node.shell.worker.batches import Schedule, learning_rate
from gpu_node.shell.worker.loop import work_failure
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.prefetch import next_prefetch, own_prefetch
from gpu_node.shell.worker.protocol import Limits, ShardProgress, TrainShard
from gpu_node.shell.worker.slowed_trainer import StepFloor
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, ShardCallbacks, ShardError
from gpu_node.shell.worker.trainers import Trainers
from gpu_node.shell.worker.training import train_shard
from hypergpu.assignment import FailureCause, Prefetch, SampleRange
from hypergpu.digests import digest_of
from hypergpu.optimizer import OptimizerRule
from hypergpu.partitions import stream_indices
from hypergpu.tensors.codec import decode_parameters
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Milliseconds, Samples, several
from hypergpu.workloads.datasets import ArraySamples, Dataset
from hypergpu.workloads.networks.task import Classification, Device, chosen_device, store_module
from hypergpu.workloads.registry import build, find
from tests.conformance.worker_process import ShardKit, Subject, change

CPU = Device("cpu", "CPU", Bytes(0), has_bf16=False)
INPUTS = np.linspace(-1, 3, 64, dtype=np.float32).reshape(16, 4)
LABELS = np.arange(16, dtype=np.int64) % 2
SAMPLES = ArraySamples(INPUTS, LABELS, LABELS)


def normalising_module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


@pytest.fixture
def trainer() -> TorchTrainer:
    torch.set_num_threads(1)
    workload = Classification(normalising_module, lambda _: Dataset(SAMPLES, SAMPLES))
    return TorchTrainer(workload, CPU, SAMPLES)


def first_model(trainer: TorchTrainer) -> Flat:
    torch.manual_seed(0)
    flat = Flat.empty(trainer.layout)
    store_module(normalising_module(), trainer.layout, flat)
    return flat


def after(trainer: TorchTrainer, start: InitialState, steps: int) -> Flat:
    trainer.begin(start)
    for _ in range(steps):
        trainer.step(np.arange(8), 1e-2)
    flat = Flat.empty(trainer.layout)
    trainer.store(flat)
    return flat


def test_statistics_and_integers_hold_what_training_made_of_them(trainer: TorchTrainer) -> None:
    flat = after(trainer, InitialState(first_model(trainer), 1, None, OptimizerRule()), steps=3)
    assert flat.integers.tolist() == [3]
    assert flat.statistics.size == 12
    assert not np.array_equal(flat.statistics, first_model(trainer).statistics)


def test_a_round_depends_on_nothing_that_was_trained_before_it(trainer: TorchTrainer) -> None:
    start = InitialState(first_model(trainer), 1, None, OptimizerRule(weight_decay=0.01))
    first = after(trainer, start, steps=3)
    after(trainer, InitialState(first, 9, None, OptimizerRule(weight_decay=0.5)), steps=2)
    again = after(trainer, start, steps=3)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_seed_decides_what_the_model_draws(trainer: TorchTrainer) -> None:
    first = after(trainer, InitialState(first_model(trainer), 1, None, OptimizerRule()), steps=2)
    other = after(trainer, InitialState(first_model(trainer), 2, None, OptimizerRule()), steps=2)
    assert not np.array_equal(first.parameters, other.parameters)


def test_the_optimizer_state_goes_on_where_it_was(trainer: TorchTrainer) -> None:
    middle = after(
        trainer,
        InitialState(first_model(trainer), 1, None, OptimizerRule(weight_decay=0.01)),
        steps=2,
    )
    kept_state = {name: array.copy() for name, array in trainer.optimizer().items()}
    resumed_model = after(
        trainer, InitialState(middle, 2, kept_state, OptimizerRule(weight_decay=0.01)), steps=2
    )
    fresh = after(trainer, InitialState(middle, 2, None, OptimizerRule(weight_decay=0.01)), steps=2)
    assert kept_state["step/0.weight"] == 2
    assert trainer.optimizer()["step/0.weight"] == 2
    assert not np.array_equal(resumed_model.parameters, fresh.parameters)


def test_the_chosen_device_has_computed_something() -> None:
    device = chosen_device()
    assert device.kind in {"cpu", "cuda", "mps"}
    assert device.memory_bytes > 0
    assert not (device.kind == "cpu" and device.has_bf16)


STEPS, BEGUN, BATCH = 4, 3, 16
RATE = 1e-3


def callbacks(counts: list[int], lines: list[str]) -> ShardCallbacks:
    """Counts how often it is asked whether the shard is still wanted: once a step."""

    def report(_: ShardProgress) -> None:
        pass

    return ShardCallbacks(lambda: counts.append(1), report, lines.append)


@pytest.fixture
def kit(tmp_path: Path) -> ShardKit:
    return ShardKit(tmp_path, Subject("numpy", "digits-softmax", {}))


def ahead(round: int) -> Prefetch:
    ranges = (SampleRange(64 * round, Samples(BEGUN * BATCH)),)
    return Prefetch(round, BEGUN, ranges, 7, Samples(0), Samples(0))


def request(kit: ShardKit, round: int) -> TrainShard:
    """Sixty-four positions of the stream a round, as float32."""
    plain = change(kit.request(round), codec="fp32", optimizer=OptimizerRule(), learning_rate=RATE)
    ranges = (SampleRange(64 * round, Samples(64)),)
    begun_prefetch = ahead(round) if round else None
    return change(plain, ranges=ranges, prefetched=begun_prefetch, prefetch=ahead(round + 1))


def take_steps(trainer: NumpyTrainer, start: InitialState, positions: SampleRange) -> Flat:
    members = np.arange(len(trainer.samples.labels), dtype=np.int64)
    indices: NDArray[np.int64] = stream_indices(members, 0, 0, [positions])
    trainer.begin(start)
    for first in range(0, len(indices), BATCH):
        trainer.step(indices[first : first + BATCH], RATE)
    out = Flat.empty(trainer.layout)
    trainer.store(out)
    return out


def test_the_steps_begun_early_start_from_the_own_end_and_move_the_model(
    kit: ShardKit,
) -> None:
    trainers = Trainers("numpy", Limits(1, 0))
    other_model = kit.folder / "next"
    before = np.fromfile(kit.folder / "model", np.float32)
    (before * np.float32(0.5) + np.float32(0.25)).tofile(other_model)
    trainers.train(request(kit, 0), callbacks([], []))
    second = change(request(kit, 1), model_path=str(other_model))
    trainers.train(second, callbacks([], []))

    workload = build(find("digits-softmax"), {})
    trainer = NumpyTrainer(workload, workload.load("").train)
    first = Flat.view(trainer.layout, np.fromfile(kit.folder / "model", np.uint8))
    end = take_steps(
        trainer, InitialState(first, 0, None, OptimizerRule()), SampleRange(0, Samples(64))
    )
    early = InitialState(end, 7, trainer.optimizer(), OptimizerRule())
    early_end = take_steps(trainer, early, SampleRange(64, Samples(BEGUN * BATCH)))
    model = Flat.view(trainer.layout, np.fromfile(other_model, np.uint8))
    moved_end = early_end._replace(
        parameters=model.parameters + (early_end.parameters - end.parameters)
    )
    rest = SampleRange(64 + BEGUN * BATCH, Samples((STEPS - BEGUN) * BATCH))
    last = take_steps(
        trainer, InitialState(moved_end, 1, trainer.optimizer(), OptimizerRule()), rest
    )
    update = np.fromfile(second.update_path, np.uint8)
    assert np.array_equal(
        decode_parameters(trainer.layout, "fp32", update), model.parameters - last.parameters
    )


def test_what_is_granted_is_what_is_asked_for_a_round_later(kit: ShardKit) -> None:
    assert next_prefetch(request(kit, 0)) == own_prefetch(request(kit, 1))
    assert next_prefetch(change(request(kit, 0), prefetch=None)) is None
    assert own_prefetch(change(request(kit, 1), resume_from=None)) is None
    assert own_prefetch(request(kit, 0)) is None


@pytest.mark.parametrize("taken", range(BEGUN + 1))
def test_a_worker_takes_only_the_steps_that_it_has_not_taken(kit: ShardKit, taken: int) -> None:
    trainers = Trainers("numpy", Limits(1, 0))
    counts: list[int] = []
    lines: list[str] = []
    trainers.train(request(kit, 0), callbacks([], []))
    assert [trainers.advance_prefetch(lines.append) for _ in range(taken)] == [True] * taken
    early = trainers.train(request(kit, 1), callbacks(counts, lines))
    assert len(counts) == STEPS - taken
    assert (early.inner_steps, early.samples) == (STEPS, 64)
    log_line = f"round #2 was begun {several(taken, 'inner step')} early"
    assert lines == ([log_line] if taken else [])
    assert early.digest == digest_of(Path(request(kit, 1).update_path).read_bytes())
    again = Trainers("numpy", Limits(1, 0)).train(request(kit, 1), callbacks([], []))
    assert again.digest == early.digest


def test_a_worker_takes_no_more_than_it_was_granted(kit: ShardKit) -> None:
    trainers = Trainers("numpy", Limits(1, 0))
    trainers.train(request(kit, 0), callbacks([], []))
    lines: list[str] = []
    assert [trainers.advance_prefetch(lines.append) for _ in range(BEGUN + 2)] == (
        [True] * BEGUN + [False] * 2
    )
    assert lines == []


def test_a_worker_without_a_grant_waits(kit: ShardKit) -> None:
    trainers = Trainers("numpy", Limits(1, 0))
    assert not trainers.advance_prefetch(print)
    trainers.train(change(request(kit, 0), prefetch=None), callbacks([], []))
    assert not trainers.advance_prefetch(print)


def test_a_beginning_that_fails_is_said_and_leaves_the_round_to_itself(kit: ShardKit) -> None:
    trainers = Trainers("numpy", Limits(1, 0))
    trainers.train(
        change(request(kit, 0), prefetch=replace(ahead(1), ranges=())), callbacks([], [])
    )
    lines: list[str] = []
    assert not trainers.advance_prefetch(lines.append)
    assert lines == ["the next round is not begun: the shard is empty"]
    assert trainers.train(request(kit, 1), callbacks([], [])).inner_steps == STEPS


def test_steps_that_are_only_played_pass_ahead_too(tmp_path: Path) -> None:
    kit = ShardKit(tmp_path, Subject("null", "null", {"parameters": 20_000}))
    trainers = Trainers("null", Limits(1, 0, Milliseconds(1)))
    counts: list[int] = []
    trainers.train(change(kit.request(0), prefetch=ahead(1)), callbacks([], []))
    assert [trainers.advance_prefetch(print) for _ in range(BEGUN + 1)] == [True] * BEGUN + [False]
    trainers.train(change(kit.request(1), prefetched=ahead(1)), callbacks(counts, []))
    assert len(counts) == STEPS - BEGUN + 1  # the answer itself asks once


def test_constant_is_the_peak() -> None:
    assert learning_rate(Schedule(0.5), Samples(10**9)) == 0.5


@pytest.mark.parametrize(("processed", "rate"), [(25, 0.25), (100, 1.0), (400, 1.0)])
def test_warm_up_rises_with_the_samples_of_the_whole_job(processed: int, rate: float) -> None:
    schedule = Schedule(1.0, warmup_samples=Samples(100))
    assert learning_rate(schedule, Samples(processed)) == rate


@pytest.mark.parametrize(("processed", "rate"), [(0, 1.0), (500, 0.5), (1000, 0.0), (2000, 0.0)])
def test_cosine_falls_to_zero_at_the_end_of_the_job(processed: int, rate: float) -> None:
    schedule = Schedule(1.0, "cosine", total_samples=Samples(1000))
    assert learning_rate(schedule, Samples(processed)) == pytest.approx(rate)


def test_a_pace_is_its_floor_when_nobody_stretches_it(tmp_path: Path) -> None:
    assert StepFloor(0.05).step_s == 0.05
    assert StepFloor(0.05, str(tmp_path / "nothing")).step_s == 0.05


def test_a_pace_follows_its_file_from_one_step_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "slowness"
    floor = StepFloor(0.5, str(path))
    path.write_text("3")
    assert floor.step_s == 1.5
    path.write_text("1")
    assert floor.step_s == 0.5


def test_a_pace_takes_no_nonsense_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "slowness"
    path.write_text("slower")
    assert StepFloor(0.5, str(path)).step_s == 0.5


def test_a_worker_that_trains_nothing_tells_the_time_that_it_let_pass(tmp_path: Path) -> None:
    request = ShardKit(tmp_path, Subject("null", "null", {"parameters": 8})).request(0)
    trainers = Trainers("null", Limits(1, 0, Milliseconds(2)))
    trained_update = trainers.train(
        request, ShardCallbacks(lambda: None, lambda _: None, lambda _: None)
    )
    assert trained_update.compute_ms >= 2 * request.task.inner_steps


def test_a_step_with_half_a_batch_is_given_half_the_time(tmp_path: Path) -> None:
    request = ShardKit(tmp_path, Subject("null", "null", {"parameters": 8})).request(0)
    request = change(request, inner_steps=1, batch_size=8, stated_batch_size=16)
    trainers = Trainers("null", Limits(1, 0, Milliseconds(40)))
    trained_update = trainers.train(
        request, ShardCallbacks(lambda: None, lambda _: None, lambda _: None)
    )
    assert trained_update.compute_ms >= 20


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x64 and 32x10)"),
        RuntimeError("the schedule's timestamps go back"),
        ValueError("no such label"),
    ],
)
def test_an_error_of_the_work_leaves_the_worker_be(error: Exception) -> None:
    failure = work_failure(error)
    assert not failure.is_fatal
    assert failure.cause is FailureCause.OTHER
    assert failure.reason == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_is_fatal_and_says_the_fix(error: Exception) -> None:
    failure = work_failure(error)
    assert failure.is_fatal
    assert failure.cause is FailureCause.OUT_OF_MEMORY
    assert "use a larger device" in failure.reason


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate(handle)",
    ],
)
def test_a_fault_of_the_driver_is_fatal(text: str) -> None:
    assert work_failure(RuntimeError(text)).is_fatal


def test_an_error_without_a_text_is_told_by_its_kind() -> None:
    assert work_failure(RuntimeError()).reason == "RuntimeError"


ROOT = Path(__file__).parents[3]


def start(environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "gpu_node.shell.worker", "--kind", "null"],
        cwd=ROOT,
        env={"PATH": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HYPERGPU_WORKER_THREADS", "many"),
        ("HYPERGPU_WORKER_THREADS", "0"),
        ("HYPERGPU_WORKER_MEMORY_BYTES", "-1"),
    ],
)
def test_a_cap_that_is_no_number_stops_the_worker_with_its_name(name: str, value: str) -> None:
    process = start({name: value})
    assert process.returncode == 2
    assert f"{name} is {value!r}; it must be a whole number".encode() in process.stderr


WORKLOAD = build(find("digits-softmax"), {})


def failure_of(kit: ShardKit, inputs: NDArray[np.float32]) -> str:
    """Why digits with these inputs cannot be trained on, 16 of them a step."""
    labels = np.arange(len(inputs), dtype=np.int64) % 10
    trainer = NumpyTrainer(WORKLOAD, ArraySamples(inputs, labels, labels))
    with pytest.raises(ShardError) as failure:
        train_shard(request(kit, 0), trainer, callbacks([], []))
    return str(failure.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sample", [0, 63])
def test_a_loss_that_comes_from_the_data_is_not_told_as_a_learning_rate_problem(
    kit: ShardKit, value: float, sample: int
) -> None:
    inputs = np.ones((64, 64), np.float32)
    inputs[sample, 0] = value
    with np.errstate(all="ignore"):
        reason = failure_of(kit, inputs)
    assert "the data of these steps hold values that are not finite numbers" in reason
    assert "learning" not in reason


def test_a_loss_that_is_not_finite_before_any_step_is_no_learning_rate_problem(
    kit: ShardKit,
) -> None:
    model = np.fromfile(kit.folder / "model", np.float32)
    np.full_like(model, 3e38).tofile(kit.folder / "model")
    with np.errstate(all="ignore"):
        reason = failure_of(kit, np.full((64, 64), 3e38, np.float32))
    assert "before any step, so that no learning rate had a part in it" in reason
