"""The torch worker on a CUDA device. Only `make test-gpu` collects this folder."""

from pathlib import Path

import numpy as np
import pytest

from tests.conformance.worker_process import (
    ShardKit,
    Subject,
    change,
    pseudo_gradient,
    spawn_worker,
)

NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
SUBJECT = Subject("torch", "digits-cnn", {"channels": 8})
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


@pytest.fixture
def kit(tmp_path: Path) -> ShardKit:
    return ShardKit(tmp_path, SUBJECT)


def cosine(one: Vector, other: Vector) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def test_worker_names_its_cuda_device_and_its_memory() -> None:
    with spawn_worker("torch") as worker:
        assert worker.capabilities.device == "cuda"
        assert worker.capabilities.device_name
        assert worker.capabilities.memory_bytes > 1 << 30


def test_update_trained_on_cuda_is_the_one_trained_on_the_cpu_up_to_rounding(
    kit: ShardKit,
) -> None:
    with spawn_worker("torch") as worker:
        assert worker.capabilities.device == "cuda"
        reply = worker.train(kit.request(0))
        on_cuda = pseudo_gradient(kit, Path(kit.request(0).update_path).read_bytes())
    assert reply.loss_last is not None
    request = change(kit.request(0, state="on-cpu"), update_path=str(kit.folder / "update-on-cpu"))
    with spawn_worker("torch", NO_DEVICE) as worker:
        assert worker.capabilities.device == "cpu"
        on_cpu = pseudo_gradient(kit, kit.update(worker, request))
    assert np.linalg.norm(on_cpu) > 0
    # Both are rounded to four bits a parameter after steps of different kernels.
    assert cosine(on_cuda, on_cpu) > 0.9


def test_new_process_on_cuda_goes_on_at_the_state_that_was_left(kit: ShardKit) -> None:
    with spawn_worker("torch") as worker:
        uninterrupted = [pseudo_gradient(kit, kit.update(worker, kit.request(n))) for n in range(3)]
        for number in range(2):
            kit.update(worker, kit.request(number, state="resumed"))
    with spawn_worker("torch") as fresh:
        resumed = pseudo_gradient(kit, kit.update(fresh, kit.request(2, state="resumed")))
    assert cosine(resumed, uninterrupted[2]) > 0.9
