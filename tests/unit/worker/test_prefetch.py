"""What a shard that was begun early is made of, computed here step by step."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from gpu_node.shell.worker.callbacks import ShardCallbacks
from gpu_node.shell.worker.limits import Limits
from gpu_node.shell.worker.messages import ShardProgress, TrainShard
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.prefetch import next_prefetch, own_prefetch
from gpu_node.shell.worker.trainer import InitialState
from gpu_node.shell.worker.trainers import Trainers
from hypergpu.dataset.sampling import stream_indices
from hypergpu.digest import digest_of
from hypergpu.statements.assignment import Prefetch, SampleRange
from hypergpu.tensors.codec import decode_parameters
from hypergpu.tensors.layout import Flat
from hypergpu.units import Milliseconds, Samples, several
from hypergpu.workloads.registry import build, find
from tests.conformance.worker_process import ShardKit, Subject, change

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
    plain = change(kit.request(round), codec="fp32", weight_decay=0.0, learning_rate=RATE)
    ranges = (SampleRange(64 * round, Samples(64)),)
    begun = ahead(round) if round else None
    return change(plain, ranges=ranges, prefetched=begun, prefetch=ahead(round + 1))


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
    end = take_steps(trainer, InitialState(first, 0, None, 0.0), SampleRange(0, Samples(64)))
    early = InitialState(end, 7, trainer.optimizer(), 0.0)
    begun = take_steps(trainer, early, SampleRange(64, Samples(BEGUN * BATCH)))
    model = Flat.view(trainer.layout, np.fromfile(other_model, np.uint8))
    moved = begun._replace(parameters=model.parameters + (begun.parameters - end.parameters))
    rest = SampleRange(64 + BEGUN * BATCH, Samples((STEPS - BEGUN) * BATCH))
    last = take_steps(trainer, InitialState(moved, 1, trainer.optimizer(), 0.0), rest)
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
    told = f"round 1 was begun {several(taken, 'inner step')} early"
    assert lines == ([told] if taken else [])
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
