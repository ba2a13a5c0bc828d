"""The torch worker on a CUDA device. Only `make test-gpu` collects this folder."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.worker_process import Desk, Subject, changed, decoded, spawned

NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
SUBJECT = Subject("torch", "digits-cnn", {"channels": 8})
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, SUBJECT)


def cosine(one: Vector, other: Vector) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def test_worker_names_its_cuda_device_and_its_memory() -> None:
    with spawned("torch") as worker:
        assert worker.ready.device == "cuda"
        assert worker.ready.device_name
        assert worker.ready.memory_bytes > 1 << 30


def test_update_trained_on_cuda_is_the_one_trained_on_the_cpu_up_to_rounding(desk: Desk) -> None:
    with spawned("torch") as worker:
        assert worker.ready.device == "cuda"
        reply = worker.trained(desk.request(0))
        on_cuda = decoded(desk, Path(desk.request(0).update_path).read_bytes())
    assert math.isfinite(reply.loss_last)
    request = changed(
        desk.request(0, state="on-cpu"), update_path=str(desk.folder / "update-on-cpu")
    )
    with spawned("torch", NO_DEVICE) as worker:
        assert worker.ready.device == "cpu"
        on_cpu = decoded(desk, desk.update(worker, request))
    assert np.linalg.norm(on_cpu) > 0
    # Both are rounded to four bits a parameter after steps of different kernels.
    assert cosine(on_cuda, on_cpu) > 0.9


def test_new_process_on_cuda_goes_on_at_the_state_that_was_left(desk: Desk) -> None:
    with spawned("torch") as worker:
        uninterrupted = [decoded(desk, desk.update(worker, desk.request(n))) for n in range(3)]
        for number in range(2):
            desk.update(worker, desk.request(number, state="resumed"))
    with spawned("torch") as fresh:
        resumed = decoded(desk, desk.update(fresh, desk.request(2, state="resumed")))
    assert cosine(resumed, uninterrupted[2]) > 0.9
