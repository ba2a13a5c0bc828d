"""Prints the most memory, in bytes, that a mixture takes in a few steps of a worker's trainer,
beyond what the process has before.

    python -m benchmarks.ours.workloads.experts.peak HELD MILLIONS STEPS
"""

import sys
from pathlib import Path

import numpy as np
import psutil
import torch

from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.optimizer import OptimizerRule
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build, find

_EXPERTS, _WIDTH = 8, 256


def peak_bytes(held: int, millions: int, steps: int) -> int:
    """Train a mixture of so many million parameters, or some of its experts."""
    torch.set_num_threads(1)
    options = {
        "experts": _EXPERTS,
        "held_experts": held,
        "width": _WIDTH,
        "hidden": millions * 10**6 // (2 * _WIDTH * _EXPERTS),
        "layers": 1,
        "block_length": 16,
        "corpus_bytes": 1 << 17,
    }
    workload = build(find("text-mixture"), options)
    samples = workload.load("").train
    workload = workload.holding(range(held)) if held else workload
    warm_up = torch.nn.Linear(8, 8)
    warm_up(torch.ones(1, 8)).sum().backward()
    before = psutil.Process().memory_info().rss
    trainer = TorchTrainer(workload, Device("cpu", "CPU", Bytes(0), has_bf16=False), samples)
    model = Flat.empty(trainer.layout)
    trainer.store(model)
    trainer.begin(InitialState(model, 0, None, OptimizerRule()))
    for _ in range(steps):
        trainer.step(np.arange(2), 1e-3)
    return _most_bytes() - before


def _most_bytes() -> int:
    """The most memory that this process has had; what `getrusage` says includes its parent's."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    (most,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(most)


if __name__ == "__main__":
    sys.stdout.write(f"{peak_bytes(*map(int, sys.argv[1:]))}\n")
