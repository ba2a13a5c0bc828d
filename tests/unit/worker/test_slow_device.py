"""How long an inner step is made to take."""

from pathlib import Path

from gpu_node.shell.worker.callbacks import ShardCallbacks
from gpu_node.shell.worker.limits import Limits
from gpu_node.shell.worker.slow_device import StepFloor
from gpu_node.shell.worker.trainers import Trainers
from hypergpu.units import Milliseconds
from tests.conformance.worker_process import ShardKit, Subject, change


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
    told = trainers.train(request, ShardCallbacks(lambda: None, lambda _: None, lambda _: None))
    assert told.compute_ms >= 2 * request.task.inner_steps


def test_a_step_with_half_a_batch_is_given_half_the_time(tmp_path: Path) -> None:
    request = ShardKit(tmp_path, Subject("null", "null", {"parameters": 8})).request(0)
    request = change(request, inner_steps=1, batch_size=8, stated_batch_size=16)
    trainers = Trainers("null", Limits(1, 0, Milliseconds(40)))
    told = trainers.train(request, ShardCallbacks(lambda: None, lambda _: None, lambda _: None))
    assert told.compute_ms >= 20
