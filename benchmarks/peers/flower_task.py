"""What Flower trains here: by the product's own trainer, on the shards that the product would give.

So only what moves the models differs. Flower's environment has no torch: the product's packages
come behind its own.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers.measured import LOOPBACK, free_port

LINKED_PORT = 9092
"""Address of the hub behind links of its own."""


class FlowerTask(NamedTuple):
    """The task to train; the fields are options of the command line."""

    packages: str
    """The product's site-packages."""
    job: str
    """A job file: model, batch, learning rate, inner steps and nodes are taken from it."""
    seed: int
    rounds: int
    floor_ms: int


def task_of(words: Sequence[str]) -> tuple[FlowerTask, list[str]]:
    """Read a task's options; whatever else was given is handed back."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in FlowerTask.__annotations__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    options, others = parser.parse_known_args(words)
    return FlowerTask(**vars(options)), others


class FlowerTraining:
    """The product's workload and judge."""

    def __init__(self, task: FlowerTask) -> None:
        if task.packages not in sys.path:
            sys.path.append(task.packages)
        import torch

        from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
        from hypergpu.jobfile.reading import read_job_file
        from hypergpu.workloads.registry import build, find

        torch.set_num_threads(1)
        self.task = task
        self.spec = read_job_file(Path(task.job))
        self.workload = build(find(self.spec.workload), self.spec.options)
        self.judge = TorchEvaluator(self.workload, "")

    def initial(self) -> Any:
        """The parameters that every system starts from."""
        return self.judge.initial(self.task.seed).parameters

    def flat(self, parameters: Any) -> Any:
        """A model of these parameters."""
        from hypergpu.tensors.layout import Flat

        model = Flat.empty(self.judge.layout)
        model.parameters[:] = parameters
        return model

    def accuracy(self, parameters: Any) -> float:
        """How good they are, on the data that nobody trains on."""
        return float(self.judge.evaluate(self.flat(parameters)).metric("accuracy"))


class Learner:
    """One node's trainer, on its shards.

    Args:
        training: What is trained.
        rank: Which of the job's nodes it is.
    """

    def __init__(self, training: FlowerTraining, rank: int) -> None:
        from gpu_node.shell.worker.slowed_trainer import SlowedTrainer, StepFloor
        from gpu_node.shell.worker.torch_engine import TorchTrainer
        from hypergpu.units import Bytes
        from hypergpu.workloads.networks.task import Device

        self._training, self._rank = training, rank
        device = Device("cpu", "CPU", Bytes(0), has_bf16=False)
        trainer = TorchTrainer(training.workload, device, training.judge.dataset.train)
        floor = StepFloor(training.task.floor_ms / 1000)
        self._trainer = SlowedTrainer(trainer, floor, training.spec.training.batch_size)
        self.optimizer: Mapping[str, Any] | None = None
        """State of AdamW after the last steps; None starts a fresh one."""

    @property
    def samples(self) -> int:
        """Taken in a round."""
        return int(
            self._training.spec.training.inner_steps * self._training.spec.training.batch_size
        )

    def train(self, parameters: Any, number: int) -> Any:
        """The parameters after the inner steps of round ``number``, which counts from 1."""
        from gpu_node.shell.worker.trainer import InitialState
        from hypergpu.tensors.layout import Flat

        inner, seed = self._training.spec.inner, self._training.task.seed
        model = self._training.flat(parameters)
        self._trainer.begin(InitialState(model, seed, self.optimizer, inner.rule))
        for indices in self._batches(number):
            self._trainer.step(indices, inner.learning_rate)
        after = Flat.empty(self._training.judge.layout)
        self._trainer.store(after)
        self.optimizer = {name: each.copy() for name, each in self._trainer.optimizer().items()}
        return after.parameters

    def _batches(self, number: int) -> Any:
        from hypergpu.assignment import SampleRange
        from hypergpu.partitions import stream_indices
        from hypergpu.units import Samples

        shape = self._training.spec.training
        start = ((number - 1) * shape.nodes + self._rank) * self.samples
        labels = self._training.judge.dataset.train.labels
        members = np.arange(len(labels), dtype=np.int64)
        ranges = [SampleRange(start, Samples(self.samples))]
        indices = stream_indices(members, 0, self._training.task.seed, ranges)
        return indices.reshape(shape.inner_steps, shape.batch_size)


class HubEnds(NamedTuple):
    """Where the hub listens, and what goes before a node's command to run it at its own end."""

    hub: str
    """With its port."""
    nodes: Sequence[tuple[list[str], str]]
    """The prefix, and the hub's address as it is dialled from there."""


def ends(nodes: int) -> HubEnds:
    """The ends of the links that netsim holds open, or of loopback when it holds none."""
    sites = json.loads(os.environ.get("NETSIM_SITES") or "null")
    if sites is None:
        hub = f"{LOOPBACK}:{free_port()}"
        return HubEnds(hub, [([], hub)] * nodes)
    far = [
        ([*site.get("prefix", [])], f"{site['dials']}:{LINKED_PORT}")
        for site in sites["nodes"].values()
    ]
    return HubEnds(f"{sites['coordinator']['dials']}:{LINKED_PORT}", far[:nodes])
