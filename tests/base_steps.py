"""One inner step on a base, also as a program, for libraries that are in an environment of their
own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.optimizer import OptimizerRule
from hypergpu.tensors.layout import Flat, Float32s
from hypergpu.units import Bytes
from hypergpu.workloads.networks.task import Device
from hypergpu.workloads.registry import build_for_job, find

SGD = OptimizerRule(name="sgd")


def causal_lm(folder: Path, **options: Any) -> Any:
    """The workload of a job with this folder."""
    return build_for_job(find("hf-causal-lm"), {"sequence_length": 64, **options}, str(folder))


def step_taken(made: Any, folder: Path, rule: OptimizerRule = SGD) -> tuple[Float32s, float]:
    """Change of B by a step with all training samples in one batch, and the loss before it."""
    device = Device("cpu", "", Bytes(0), has_bf16=False)
    trainer = TorchTrainer(made, device, made.load(str(folder)).train)
    first, after = Flat.empty(trainer.layout), Flat.empty(trainer.layout)
    draws = np.random.default_rng(0).standard_normal(first.parameters.size)
    first.parameters[:] = 0.01 * draws
    trainer.begin(InitialState(first, 1, None, rule))
    loss = float(trainer.step(np.arange(len(trainer.samples.labels)), 0.1))
    trainer.store(after)
    return after.parameters - first.parameters, loss


if __name__ == "__main__":
    made_here = causal_lm(Path(sys.argv[1]), base_dtype=sys.argv[2])
    change, loss_before = step_taken(made_here, Path(sys.argv[1]))
    sys.stdout.write(json.dumps([change.tolist(), loss_before]))
