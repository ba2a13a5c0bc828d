"""What a shard that was begun early is made of, computed here step by step."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from gpu_node.shell.worker.limits import Limits
from gpu_node.shell.worker.messages import Ahead, PositionRange, Progress, Train
from gpu_node.shell.worker.shard.beginning import asked_for, prefetch_request
from gpu_node.shell.worker.shard.watch import Watch
from gpu_node.shell.worker.trainer.interface import Start
from gpu_node.shell.worker.trainer.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.workshop import Workshop
from hypergpu.dataset.sampling import stream_indices
from hypergpu.digest import digest_of
from hypergpu.tensors.codec import decode_parameters
from hypergpu.tensors.layout import Flat
from hypergpu.units import Milliseconds, Samples, several
from hypergpu.workloads.registry import build, find
from tests.conformance.worker_process import Desk, Subject, changed

STEPS, BEGUN, BATCH = 4, 3, 16
RATE = 1e-3


def heard(counts: list[int], lines: list[str]) -> Watch:
    """Counts how often it is asked whether the shard is still wanted: once a step."""

    def report(_: Progress) -> None:
        pass

    return Watch(lambda: counts.append(1), report, lines.append)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, Subject("numpy", "digits-softmax", {}))


def ahead(round: int) -> Ahead:
    ranges = (PositionRange(64 * round, Samples(BEGUN * BATCH)),)
    return Ahead(round, BEGUN, ranges, 7, Samples(0), Samples(0))


def request(desk: Desk, round: int) -> Train:
    """Sixty-four positions of the stream a round, as float32."""
    plain = changed(desk.request(round), codec="fp32", weight_decay=0.0, learning_rate=RATE)
    ranges = (PositionRange(64 * round, Samples(64)),)
    begun = ahead(round) if round else None
    return changed(plain, ranges=ranges, begun=begun, ahead=ahead(round + 1))


def stepped(trainer: NumpyTrainer, start: Start, positions: PositionRange) -> Flat:
    members = np.arange(len(trainer.samples.labels), dtype=np.int64)
    indices: NDArray[np.int64] = stream_indices(members, 0, 0, [positions])
    trainer.begin(start)
    for first in range(0, len(indices), BATCH):
        trainer.step(indices[first : first + BATCH], RATE)
    out = Flat.empty(trainer.layout)
    trainer.store(out)
    return out


def test_the_steps_begun_early_start_from_the_own_end_and_move_the_model(desk: Desk) -> None:
    workshop = Workshop("numpy", Limits(1, 0))
    other_model = desk.folder / "next"
    before = np.fromfile(desk.folder / "model", np.float32)
    (before * np.float32(0.5) + np.float32(0.25)).tofile(other_model)
    workshop.train(request(desk, 0), heard([], []))
    second = changed(request(desk, 1), model_path=str(other_model))
    workshop.train(second, heard([], []))

    workload = build(find("digits-softmax"), {})
    trainer = NumpyTrainer(workload, workload.load("").train)
    first = Flat.view(trainer.layout, np.fromfile(desk.folder / "model", np.uint8))
    end = stepped(trainer, Start(first, 0, None, 0.0), PositionRange(0, Samples(64)))
    early = Start(end, 7, trainer.optimizer(), 0.0)
    begun = stepped(trainer, early, PositionRange(64, Samples(BEGUN * BATCH)))
    model = Flat.view(trainer.layout, np.fromfile(other_model, np.uint8))
    moved = begun._replace(parameters=model.parameters + (begun.parameters - end.parameters))
    rest = PositionRange(64 + BEGUN * BATCH, Samples((STEPS - BEGUN) * BATCH))
    last = stepped(trainer, Start(moved, 1, trainer.optimizer(), 0.0), rest)
    update = np.fromfile(second.update_path, np.uint8)
    assert np.array_equal(
        decode_parameters(trainer.layout, "fp32", update), model.parameters - last.parameters
    )


def test_what_is_granted_is_what_is_asked_for_a_round_later(desk: Desk) -> None:
    assert prefetch_request(request(desk, 0)) == asked_for(request(desk, 1))
    assert prefetch_request(changed(request(desk, 0), ahead=None)) is None
    assert asked_for(changed(request(desk, 1), resume_from=None)) is None
    assert asked_for(request(desk, 0)) is None


@pytest.mark.parametrize("taken", range(BEGUN + 1))
def test_a_worker_takes_only_the_steps_that_it_has_not_taken(desk: Desk, taken: int) -> None:
    workshop = Workshop("numpy", Limits(1, 0))
    counts: list[int] = []
    lines: list[str] = []
    workshop.train(request(desk, 0), heard([], []))
    assert [workshop.steps_ahead(lines.append) for _ in range(taken)] == [True] * taken
    early = workshop.train(request(desk, 1), heard(counts, lines))
    assert len(counts) == STEPS - taken
    assert (early.inner_steps, early.samples) == (STEPS, 64)
    told = f"round 1 was begun {several(taken, 'inner step')} early"
    assert lines == ([told] if taken else [])
    assert early.update_digest == digest_of(Path(request(desk, 1).update_path).read_bytes())
    again = Workshop("numpy", Limits(1, 0)).train(request(desk, 1), heard([], []))
    assert again.update_digest == early.update_digest


def test_a_worker_takes_no_more_than_it_was_granted(desk: Desk) -> None:
    workshop = Workshop("numpy", Limits(1, 0))
    workshop.train(request(desk, 0), heard([], []))
    lines: list[str] = []
    assert [workshop.steps_ahead(lines.append) for _ in range(BEGUN + 2)] == (
        [True] * BEGUN + [False] * 2
    )
    assert lines == []


def test_a_worker_without_a_grant_waits(desk: Desk) -> None:
    workshop = Workshop("numpy", Limits(1, 0))
    assert not workshop.steps_ahead(print)
    workshop.train(changed(request(desk, 0), ahead=None), heard([], []))
    assert not workshop.steps_ahead(print)


def test_a_beginning_that_fails_is_said_and_leaves_the_round_to_itself(desk: Desk) -> None:
    workshop = Workshop("numpy", Limits(1, 0))
    workshop.train(changed(request(desk, 0), ahead=replace(ahead(1), ranges=())), heard([], []))
    lines: list[str] = []
    assert not workshop.steps_ahead(lines.append)
    assert lines == ["the next round is not begun: the shard is empty"]
    assert workshop.train(request(desk, 1), heard([], [])).inner_steps == STEPS


def test_steps_that_are_only_played_pass_ahead_too(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Subject("null", "null", {"parameters": 20_000}))
    workshop = Workshop("null", Limits(1, 0, Milliseconds(1)))
    counts: list[int] = []
    workshop.train(changed(desk.request(0), ahead=ahead(1)), heard([], []))
    assert [workshop.steps_ahead(print) for _ in range(BEGUN + 1)] == [True] * BEGUN + [False]
    workshop.train(changed(desk.request(1), begun=ahead(1)), heard(counts, []))
    assert len(counts) == STEPS - BEGUN + 1  # the answer itself asks once
