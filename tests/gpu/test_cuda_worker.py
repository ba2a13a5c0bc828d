"""The torch worker on a CUDA device. Only `make test-gpu` collects this folder."""

from pathlib import Path

import numpy as np
import pytest

from gpu_node.shell.worker import protocol
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.assignment import SampleRange
from hypergpu.optimizer import OptimizerRule
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.networks.task import Device
from tests.base_steps import causal_lm
from tests.conformance.worker_process import (
    ShardKit,
    Subject,
    change,
    pseudo_gradient,
    spawn_worker,
)
from tests.tiny_bases import save_base, write_chats

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that are of interest elsewhere
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
        uninterrupted_updates = [
            pseudo_gradient(kit, kit.update(worker, kit.request(n))) for n in range(3)
        ]
        for number in range(2):
            kit.update(worker, kit.request(number, state="resumed"))
    with spawn_worker("torch") as fresh:
        resumed_update = pseudo_gradient(kit, kit.update(fresh, kit.request(2, state="resumed")))
    assert cosine(resumed_update, uninterrupted_updates[2]) > 0.9


def change_on(device: str, folder: Path, *, has_bf16: bool, base_dtype: str = "float32") -> Vector:
    """Change of an adapter by one step of eight chats."""
    workload = causal_lm(folder, base_dtype=base_dtype)
    samples = workload.load(str(folder)).train
    trainer = TorchTrainer(workload, Device(device, "", Bytes(0), has_bf16), samples)
    first, after = Flat.empty(trainer.layout), Flat.empty(trainer.layout)
    first.parameters[:] = 0.01
    trainer.begin(InitialState(first, 1, None, OptimizerRule(name="sgd")))
    trainer.step(np.arange(8), 0.1)
    trainer.store(after)
    return after.parameters - first.parameters


@pytest.mark.parametrize(
    ("has_bf16", "base_dtype", "least"),
    [
        (False, "float32", 0.9999),
        (True, "float32", 0.98),
        (True, "bfloat16", 0.98),
        (True, "4bit", 0.9),  # needs hypergpu[hf4bit]
    ],
)
def test_an_adapter_trains_on_cuda_as_on_the_cpu_in_each_precision(
    tmp_path: Path, *, has_bf16: bool, base_dtype: str, least: float
) -> None:
    save_base(tmp_path)
    write_chats(tmp_path)
    on_cpu = change_on("cpu", tmp_path, has_bf16=False)
    on_cuda = change_on("cuda", tmp_path, has_bf16=has_bf16, base_dtype=base_dtype)
    assert cosine(on_cuda, on_cpu) > least


def test_a_batch_that_does_not_fit_on_cuda_fits_in_parts(tmp_path: Path) -> None:
    # One sequence takes some 100 MB of activations, the whole batch some 100 GB.
    text = Subject("torch", "text-gpt", {"width": 256, "layers": 8, "block_length": 512})
    kit = ShardKit(tmp_path, text)
    shard = {"ranges": (SampleRange(0, Samples(1024)),), "batch_size": 1024, "inner_steps": 1}
    whole = change(kit.request(0), **shard)
    with spawn_worker("torch", {"HYPERGPU_WORKER_MEMORY_BYTES": str(4 << 30)}) as worker:
        worker.send(whole)
        reply = worker.answer()
    assert isinstance(reply, protocol.ShardFailed)
    assert reply.reason.startswith("out of memory")
    parts = change(whole, optimizer=OptimizerRule(micro_batch=8))

    with spawn_worker("torch", {"HYPERGPU_WORKER_MEMORY_BYTES": str(4 << 30)}) as worker:
        assert worker.train(parts).samples


def test_a_worker_on_cuda_tells_what_its_first_step_took(kit: ShardKit) -> None:
    with spawn_worker("torch") as worker:
        update = worker.train(kit.request(0))
    assert update.memory_peak_bytes > update.memory_before_bytes > 0
