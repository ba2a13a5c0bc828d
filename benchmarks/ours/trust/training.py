"""Twenty nodes that train at once: each step of all of them is one of torch's on stacked tensors.

Module, loss, data, streams of samples and AdamW are the product's. One trainer for each node in
turn would take ten times as long, and the benchmark trains a thousand models.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call, vmap
from torch.optim.adamw import adamw

from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.dataset import Indices, Sharding, partition_indices, permutation, stream_indices
from hypergpu.statements import SampleRange
from hypergpu.tensors.layout import Flat, Float32s, Layout
from hypergpu.units import Samples
from hypergpu.workloads.networks.task import Classification
from hypergpu.workloads.workload import ArraySamples, Dataset, build, find

NODES = 20
WIDTH = 64
INNER_STEPS = 20
BATCH = 32
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
TRIAL_SAMPLES = 128
"""Held-out samples that the rule sees; accuracy is measured on the others."""
_SPLIT_SEED = 17

Rows = npt.NDArray[np.float32]
"""``float32[nodes, parameters]``: one pseudo-gradient each."""


class HeldOutParts(NamedTuple):
    """One evaluator for the rule and one for the score; no sample is in both."""

    trial: TorchEvaluator
    scored: TorchEvaluator


def digits_workload() -> Classification:
    """The perceptron with two hidden layers."""
    workload: Classification = build(find("digits-mlp"), {"width": WIDTH})
    return workload


def held_out_parts(workload: Classification) -> HeldOutParts:
    """Divide the held-out samples."""
    whole = workload.load("")
    order = permutation(_SPLIT_SEED, 0, 0, len(whole.test.labels))

    def part(chosen: Indices) -> TorchEvaluator:
        inputs, targets = whole.test.batch(chosen)
        dataset = Dataset(whole.train, ArraySamples(inputs, targets, targets))
        return TorchEvaluator(workload._replace(read=lambda _: dataset), "")

    return HeldOutParts(part(order[:TRIAL_SAMPLES]), part(order[TRIAL_SAMPLES:]))


class TrainingNodes:
    """Data and optimizer state of all nodes, which last from round to round."""

    def __init__(self, workload: Classification, alpha: float, seed: int) -> None:
        """Divide the training data.

        Args:
            workload: What they train.
            alpha: Concentration of the label skew; 0: all nodes draw from the same samples.
            seed: Of data and streams.
        """
        self._workload = workload
        self._module = workload.model()
        self._seed = seed
        self._samples = workload.load("").train
        self._partitions = partition_indices(self._samples.labels, Sharding(NODES, alpha, seed))
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps = torch.zeros(())
        self._losses = vmap(self._loss)

    def train(self, layout: Layout, base: Flat, number: int, liars: Collection[int] = ()) -> Rows:
        """Take a round's inner steps from the model ``base``; labels of ``liars`` are turned."""
        stacked = _stack(layout, base)
        chosen = np.stack([self.indices(node, number) for node in range(NODES)])
        inputs, targets = self._samples.batch(chosen.reshape(-1))
        inputs = inputs.reshape(NODES, INNER_STEPS, BATCH, -1)
        targets = targets.reshape(NODES, INNER_STEPS, BATCH).copy()
        for node in liars:
            targets[node] = 9 - targets[node]
        before = _unstack(layout, stacked)
        for step in range(INNER_STEPS):
            batch = (torch.from_numpy(inputs[:, step]), torch.from_numpy(targets[:, step]))
            total = self._losses(stacked, *batch).sum()
            self._take_step(stacked, torch.autograd.grad(total, list(stacked.values())))
        return before - _unstack(layout, stacked)

    def _loss(
        self, tensors: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        module = _Bound(self._module, tensors)
        return self._workload.loss(module, inputs, targets)

    def indices(self, node: int, number: int) -> Indices:
        count = INNER_STEPS * BATCH
        partition, start = node, number * count
        if len(self._partitions) == 1:
            partition, start = 0, (number * NODES + node) * count
        members = self._partitions[partition]
        run = SampleRange(start, Samples(count))
        return stream_indices(members, partition, self._seed, [run])

    @torch.no_grad()
    def _take_step(
        self, stacked: dict[str, torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        for name, tensor in stacked.items():
            if name not in self._moments:
                self._moments[name] = (torch.zeros_like(tensor), torch.zeros_like(tensor))
        names = list(stacked)
        steps = [self._steps.clone() for _ in names]
        adamw(
            [stacked[name] for name in names],
            [each.contiguous() for each in gradients],  # The fused kernel reads no strides.
            [self._moments[name][0] for name in names],
            [self._moments[name][1] for name in names],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            eps=1e-8,
            maximize=False,
        )
        self._steps = steps[0]


class _Bound(torch.nn.Module):
    """A module that is called with other tensors than its own."""

    def __init__(self, module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._run = partial(functional_call, module, tensors)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._run((inputs,))
        return result


def _stack(layout: Layout, base: Flat) -> dict[str, torch.Tensor]:
    """The model's tensors, once for each node."""
    return {
        tensor.name: torch.from_numpy(
            np.repeat(
                base.parameters[start : start + tensor.count].reshape(1, *tensor.shape),
                NODES,
                axis=0,
            )
        ).requires_grad_()
        for tensor, start in zip(layout.tensors, layout.offsets, strict=True)
    }


def _unstack(layout: Layout, stacked: dict[str, torch.Tensor]) -> Rows:
    parts: Sequence[Float32s] = [
        stacked[tensor.name].detach().numpy().reshape(NODES, -1) for tensor in layout.tensors
    ]
    return np.concatenate(parts, axis=1)
