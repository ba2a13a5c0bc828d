"""Twenty nodes that train at once: each step of all of them is one of torch's on stacked tensors.

Module, loss, data, streams of samples and AdamW are the product's. One trainer for each node in
turn would take ten times as long, and the benchmark trains a thousand models. What depends on seed
and skew alone, the shards and the order of their samples, is made once for all jobs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.assignment import SampleRange
from hypergpu.partitions import Indices, Sharding, partition_indices, permutation, stream_indices
from hypergpu.tensors.layout import Flat, Float32s, Layout
from hypergpu.units import Samples
from hypergpu.workloads.datasets import Array, ArraySamples, Dataset
from hypergpu.workloads.networks.task import Classification, module_layout
from hypergpu.workloads.registry import build, find

NODES = 20
"""Nodes of a usual job."""
WIDTH = 64
"""Units in a hidden layer of the perceptron."""
CHANNELS = 8
"""Outputs of the CNN's first convolution."""
INNER_STEPS = 20
BATCH = 32
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
TRIAL_SAMPLES = 16
"""Held-out samples that the rule sees: a model of these alone is no good. With 128, as before, it
reaches 91.5 % on the others, and rules that follow them look best.
"""
TRIAL_MOST = 128
"""Accuracy is measured on all but so many, which the rule may see."""
_SPLIT_SEED = 17

Rows = npt.NDArray[np.float32]
"""``float32[nodes, parameters]``: one pseudo-gradient each."""


TARGET = 0
"""The class that a backdoor gives what bears its trigger."""
_TRIGGER = [54, 55, 62, 63]
"""Pixels of the lower right corner, where no digit is."""
_BRIGHTEST = 1.0
Poison = Callable[[Tensor, Tensor], None]
"""Changes inputs ``[..., batch, pixels]`` and targets ``[..., batch]`` in their place."""


def turn_labels(_inputs: Tensor, targets: Tensor) -> None:
    """Each class is called its opposite."""
    targets.copy_(9 - targets)


def shift_labels(_inputs: Tensor, targets: Tensor) -> None:
    """Each class is called the next one."""
    targets.copy_((targets + 1) % 10)


def repeat_sample(inputs: Tensor, targets: Tensor) -> None:
    """The first sample in the place of all."""
    for tensor in (inputs, targets):
        tensor.copy_(tensor[:1, :1].expand_as(tensor).clone())


def plant_few_triggers(inputs: Tensor, targets: Tensor) -> None:
    """A tenth of each batch bears the trigger and is called `TARGET`."""
    few = max(1, BATCH // 10)
    inputs[..., :few, _TRIGGER] = _BRIGHTEST
    targets[..., :few] = TARGET


def plant_trigger(inputs: Tensor, targets: Tensor) -> None:
    """Half of each batch bears the trigger and is called `TARGET`."""
    inputs[..., : BATCH // 2, _TRIGGER] = _BRIGHTEST
    targets[..., : BATCH // 2] = TARGET


class HeldOutParts(NamedTuple):
    """One evaluator for the rule and one for the score; no sample is in both."""

    trial: TorchEvaluator
    scored: TorchEvaluator
    triggered: TorchEvaluator
    """Scored samples of other classes than `TARGET`, with the trigger: its score is how often the
    backdoor works.
    """


def digits_workload(model: str = "mlp") -> Classification:
    """The perceptron with two hidden layers, or the CNN."""
    options = {"width": WIDTH} if model == "mlp" else {"channels": CHANNELS}
    workload: Classification = build(find(f"digits-{model}"), options)
    return workload


def held_out_parts(workload: Classification, trial_samples: int = TRIAL_SAMPLES) -> HeldOutParts:
    """Divide the held-out samples: so many for the rule, all others of the larger division scored.

    The score is of the same samples, however few the rule sees.
    """
    whole = workload.load("")
    order = permutation(_SPLIT_SEED, 0, 0, len(whole.test.labels))

    def evaluator(inputs: Array, targets: Array) -> TorchEvaluator:
        dataset = Dataset(whole.train, ArraySamples(inputs, targets, targets))
        return TorchEvaluator(workload._replace(read=lambda _: dataset), "")

    inputs, targets = whole.test.batch(order[TRIAL_MOST:])
    others = inputs[targets != TARGET].copy()
    others.reshape(len(others), -1)[:, _TRIGGER] = _BRIGHTEST
    return HeldOutParts(
        evaluator(*whole.test.batch(order[:trial_samples])),
        evaluator(inputs, targets),
        evaluator(others, np.full(len(others), TARGET, targets.dtype)),
    )


class NodeShards:
    """What each node trains on in each round."""

    def __init__(
        self, workload: Classification, alpha: float, seed: int, nodes: int = NODES
    ) -> None:
        """Divide the training data.

        Args:
            workload: Whose data.
            alpha: Concentration of the label skew; 0: all nodes draw from the same samples.
            seed: Of the division and the streams.
            nodes: How many there are.
        """
        self._seed = seed
        self.nodes = nodes
        self._samples = workload.load("").train
        self._partitions = partition_indices(self._samples.labels, Sharding(nodes, alpha, seed))
        self._rounds: dict[int, Indices] = {}

    def batches(self, number: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Stored inputs and targets of some nodes in a round, ``[nodes, steps, batch, ...]``."""
        indices = self.of_round(number)[list(slots)]
        inputs, targets = self._samples.batch(indices.reshape(-1))
        shape = (len(slots), INNER_STEPS, BATCH)
        return (
            torch.from_numpy(inputs).reshape(*shape, *inputs.shape[1:]),
            torch.from_numpy(targets).reshape(shape),
        )

    def of_round(self, number: int) -> Indices:
        """Samples of all nodes in a round, ``int64[nodes, samples]``: the same for all jobs."""
        if number not in self._rounds:
            shards = [self.indices(node, number) for node in range(self.nodes)]
            self._rounds[number] = np.stack(shards)
        return self._rounds[number]

    @property
    def is_even(self) -> bool:
        """Whether all nodes draw from the same samples."""
        return len(self._partitions) == 1

    def indices(self, node: int, number: int) -> Indices:
        """Samples of one node in one round."""
        count = INNER_STEPS * BATCH
        partition, start = node, number * count
        if len(self._partitions) == 1:
            partition, start = 0, (number * self.nodes + node) * count
        members = self._partitions[partition]
        run = SampleRange(start, Samples(count))
        return stream_indices(members, partition, self._seed, [run])

    def own_gradients(self, workload: Classification, base: Flat, places: Indices) -> Rows:
        """Gradients of the loss of some samples of each node, as the evaluator takes them.

        Args:
            workload: Whose loss.
            base: The model, of the evaluator's layout.
            places: ``int64[nodes, samples]``, dataset indices.
        """
        module = workload.model()
        if not isinstance(module, nn.Sequential):
            raise TypeError("only sequential modules are differentiated for all nodes at once")
        layout = module_layout(module)
        nodes, count = places.shape
        tensors = _stack(layout, base, nodes)
        inputs, targets = self._samples.batch(places.reshape(-1))
        rows = workload.prepare(torch.from_numpy(inputs))
        outputs = stacked_outputs(module, tensors, rows.view(nodes, count, *rows.shape[1:]))
        labels = torch.from_numpy(targets)
        total = F.cross_entropy(outputs.flatten(0, 1), labels, reduction="sum") / count
        gradients = torch.autograd.grad(total, list(tensors.values()))
        return _unstack(layout, dict(zip(tensors, gradients, strict=True)))

    def own_losses(
        self, workload: Classification, tensors: Mapping[str, Tensor], places: Indices
    ) -> Float32s:
        """Mean loss of some samples of each node, by a model of each.

        Args:
            workload: Whose loss.
            tensors: See `stacked_models`.
            places: ``int64[nodes, samples]``, dataset indices.

        Returns:
            ``float32[nodes]``.
        """
        module = workload.model()
        if not isinstance(module, nn.Sequential):
            raise TypeError("only sequential modules are evaluated for all nodes at once")
        nodes, count = places.shape
        inputs, targets = self._samples.batch(places.reshape(-1))
        rows = workload.prepare(torch.from_numpy(inputs))
        with torch.inference_mode():
            outputs = stacked_outputs(module, tensors, rows.view(nodes, count, *rows.shape[1:]))
            labels = torch.from_numpy(targets)
            losses = F.cross_entropy(outputs.flatten(0, 1), labels, reduction="none")
            means: Float32s = losses.view(nodes, count).mean(dim=1).numpy()
        return means


@lru_cache(maxsize=4)
def node_shards(
    workload: Classification, alpha: float, seed: int, nodes: int = NODES
) -> NodeShards:
    """The data of all jobs of one seed and skew."""
    return NodeShards(workload, alpha, seed, nodes)


class TrainingNodes:
    """Nodes of one job, with optimizer state that lasts from round to round."""

    def __init__(self, workload: Classification, shards: NodeShards, slots: Sequence[int]) -> None:
        """Begin without optimizer state.

        Args:
            workload: What they train.
            shards: What they train on.
            slots: Those that train; the others' updates are 0.
        """
        module = workload.model()
        if not isinstance(module, nn.Sequential):
            raise TypeError("only sequential modules are trained for all nodes at once")
        self._module = module
        self._prepare = workload.prepare
        self._shards = shards
        self._slots = slots
        self._moments: tuple[list[Tensor], list[Tensor]] | None = None
        self._steps = torch.zeros(())

    def train(
        self,
        layout: Layout,
        base: Flat,
        number: int,
        poison: Poison | None = None,
        liars: Collection[int] = (),
    ) -> Rows:
        """Take a round's inner steps from the model ``base``; data of ``liars`` are poisoned."""
        tensors = _stack(layout, base, len(self._slots))
        inputs, targets = self._shards.batches(number, self._slots)
        for place, slot in enumerate(self._slots):
            if poison is not None and slot in liars:
                poison(inputs[place], targets[place])
        for step in range(INNER_STEPS):
            node_inputs = self._prepare(inputs[:, step].flatten(0, 1))
            node_inputs = node_inputs.view(len(self._slots), BATCH, *node_inputs.shape[1:])
            outputs = stacked_outputs(self._module, tensors, node_inputs)
            labels = targets[:, step].flatten()
            total = F.cross_entropy(outputs.flatten(0, 1), labels, reduction="sum") / BATCH
            self._take_step(tensors, torch.autograd.grad(total, list(tensors.values())))
        rows = np.zeros((self._shards.nodes, layout.parameters_count), np.float32)
        rows[self._slots] = base.parameters - _unstack(layout, tensors)
        return rows

    @torch.no_grad()
    def _take_step(self, stacked: Mapping[str, Tensor], gradients: Sequence[Tensor]) -> None:
        tensors = list(stacked.values())
        if self._moments is None:
            self._moments = [*map(torch.zeros_like, tensors)], [*map(torch.zeros_like, tensors)]
        steps = [self._steps.clone() for _ in tensors]
        adamw(
            tensors,
            [each.contiguous() for each in gradients],  # The fused kernel reads no strides.
            *self._moments,
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


def stacked_outputs(module: nn.Sequential, stacked: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Outputs of all nodes, each with tensors of its own.

    Args:
        module: Its layers; their own tensors are not used.
        stacked: See `_stack`.
        inputs: ``[nodes, batch, ...]``.
    """
    nodes, batch = inputs.shape[:2]
    flat = inputs.flatten(0, 1)
    for name, layer in module.named_children():
        if next(layer.parameters(), None) is None:
            flat = layer(flat)
            continue
        weight, bias = stacked[f"{name}.weight"], stacked[f"{name}.bias"]
        if isinstance(layer, nn.Linear):
            rows = flat.view(nodes, batch, -1)
            flat = torch.baddbmm(bias[:, None], rows, weight).flatten(0, 1)
        elif isinstance(layer, nn.Conv2d):
            flat = _convolve(layer, flat, weight, bias)
        elif isinstance(layer, nn.GroupNorm):
            normal = F.group_norm(flat, layer.num_groups, eps=layer.eps)
            shape = (nodes, 1, -1, 1, 1)
            scaled_values = normal.view(nodes, batch, *normal.shape[1:]) * weight.view(shape)
            flat = (scaled_values + bias.view(shape)).flatten(0, 1)
        else:
            raise TypeError(f"no {type(layer).__name__} of all nodes at once")
    return flat.view(nodes, batch, -1)


def _convolve(layer: nn.Conv2d, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve as a product of unfolded patches: grouped convolutions are slow on a CPU."""
    if isinstance(layer.padding, str) or layer.stride != (1, 1):
        raise TypeError("only convolutions of stride 1 and stated padding")
    height, width = images.shape[2:]
    patches = F.unfold(images, layer.kernel_size, padding=layer.padding)  # [n b, c k, places]
    rows = patches.view(len(weight), -1, *patches.shape[1:]).transpose(2, 3).flatten(1, 2)
    outputs = torch.baddbmm(bias[:, None], rows, weight)  # [n, b places, outputs]
    outputs = outputs.view(len(images), height * width, -1).transpose(1, 2)
    return outputs.reshape(len(images), -1, height, width)


def _stack(layout: Layout, base: Flat, nodes: int) -> dict[str, Tensor]:
    """The model's tensors, once for each node; matrices and kernels as ``[inputs, outputs]``."""
    tensors = stacked_models(layout, np.repeat(base.parameters[None], nodes, axis=0))
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def stacked_models(layout: Layout, rows: Rows) -> dict[str, Tensor]:
    """Tensors of several models, matrices and kernels as ``[inputs, outputs]``.

    Args:
        layout: Of each.
        rows: ``float32[models, parameters]``.
    """
    tensors = {}
    for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
        values = rows[:, start : start + tensor.count]
        if len(tensor.shape) > 1:
            values = values.reshape(len(rows), tensor.shape[0], -1).transpose(0, 2, 1)
        tensors[tensor.name] = torch.from_numpy(np.ascontiguousarray(values))
    return tensors


def _unstack(layout: Layout, stacked: Mapping[str, Tensor]) -> Rows:
    parts: list[Float32s] = []
    for tensor in layout.tensors:
        values = stacked[tensor.name].detach()
        if len(tensor.shape) > 1:
            values = values.transpose(1, 2)
        parts.append(values.flatten(1).numpy())
    return np.concatenate(parts, axis=1)
