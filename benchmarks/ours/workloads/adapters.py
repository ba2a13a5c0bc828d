"""Adapters by every way and seed: a program that prints the outcomes of its orders as JSON.

The planned job is the product's. The others are plain torch and peft: one machine, and FlowerTune's
loop, which averages both factors of LoRA after every ten steps of a fresh AdamW.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.ours.workloads.planned import PlannedTraining
from hypergpu.assignment import SampleRange
from hypergpu.jobfile.spec import JobSpec
from hypergpu.optimizer import schedule_share
from hypergpu.partitions import stream_indices
from hypergpu.units import Samples
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.finetuning.causal import CausalLmWorkload
from hypergpu.workloads.registry import build_for_job, find
from netsim.run.choices import Choices, chosen_world, required_job

FLOWER_STEPS = 10
"""Inner steps of a node between FlowerTune's exchanges."""
PLANNED, ONE, FLOWER, UNTRAINED = "planned", "one", "flower", "untrained"


class SeedOrder(msgspec.Struct, frozen=True):
    """A way to train, with its seed."""

    way: str
    world: str
    job: str
    seed: int
    learning_rate: float
    samples: int = 0
    """To train on; the plan decides for itself."""
    schedule: str = "constant"
    """Course of one machine's learning rate; the job file has that of the plan."""


class SeedOutcome(msgspec.Struct, frozen=True):
    """What an adapter came to on the held-out functions."""

    loss: float
    accuracy: float
    """Share of the predicted tokens that are the likeliest."""
    samples: int
    bytes_both_ways: int = 0
    steps: tuple[tuple[int, ...], ...] = ()
    """Inner steps of each accepted update, by round."""
    adapter_values: int = 0
    """Values of both factors of the plain adapter."""


class PlainAdapter(nn.Module):
    """A base with peft's LoRA, both factors trained; gives logits."""

    def __init__(self, base: Path, spec: JobSpec, seed: int) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        torch.manual_seed(seed)
        rank, alpha = int(spec.options["rank"]), int(spec.options["alpha"])
        self.adapted: Any = get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
        )

    def forward(self, **inputs: Any) -> Tensor:
        """Compute logits."""
        logits: Tensor = self.adapted(**inputs).logits
        return logits

    def factors(self) -> list[nn.Parameter]:
        """Return what is trained."""
        return [each for each in self.parameters() if each.requires_grad]


class PlainJob(NamedTuple):
    """Data and settings of the plain ways."""

    spec: JobSpec
    workload: CausalLmWorkload
    data_dir: Path
    order: SeedOrder

    def train(self) -> SeedOutcome:
        """Train the way that is ordered, and measure it."""
        dataset = self.workload.load(str(self.data_dir))
        model = PlainAdapter(self.data_dir / "base", self.spec, self.order.seed)
        if self.order.way != UNTRAINED:
            self._train(model, dataset.train)
        return held_out_outcome(self.workload, model, dataset.test, self.order.samples)

    def _train(self, model: PlainAdapter, samples: Any) -> None:
        members = np.arange(len(samples.labels), dtype=np.int64)
        ranges = [SampleRange(0, Samples(self.order.samples))]
        indices = stream_indices(members, 0, self.order.seed, ranges)
        shape = self.spec.training
        if self.order.way == FLOWER:
            self._average(model, samples, indices)
        else:
            self._step(model, samples, _batches(indices, shape.batch_size * shape.nodes))

    def _step(
        self, model: PlainAdapter, samples: Any, batches: Sequence[NDArray[np.int64]]
    ) -> None:
        inner, peak = self.spec.inner, self.order.learning_rate
        optimizer = torch.optim.AdamW(model.factors(), peak, weight_decay=inner.weight_decay)
        for number, batch in enumerate(batches, 1):
            share = schedule_share(self.order.schedule, number / len(batches))
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.zero_grad(set_to_none=True)
            fields = [torch.from_numpy(each) for each in samples.batch(batch)]
            self.workload.loss(model, *fields).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _average(self, model: PlainAdapter, samples: Any, indices: NDArray[np.int64]) -> None:
        """Federated averaging of both factors; all nodes do equal work."""
        shape = self.spec.training
        factors = model.factors()
        turn = _batches(indices, shape.batch_size * FLOWER_STEPS)
        for first in range(0, len(turn), shape.nodes):
            before = [each.detach().clone() for each in factors]
            sums = [torch.zeros_like(each) for each in factors]
            shards = turn[first : first + shape.nodes]
            for shard in shards:
                _assign(factors, before)
                self._step(model, samples, _batches(shard, shape.batch_size))
                for total, each in zip(sums, factors, strict=True):
                    total.add_(each.detach() / len(shards))
            _assign(factors, sums)


def held_out_outcome(
    workload: CausalLmWorkload, model: PlainAdapter, samples: Any, count: int
) -> SeedOutcome:
    """Measure a plain adapter as the product measures one."""
    total = Sums(0.0, 0.0, 0)
    with torch.inference_mode():
        for batch in _batches(np.arange(len(samples.labels)), workload.evaluation_batch):
            fields = [torch.from_numpy(each) for each in samples.batch(batch)]
            total = total.plus(workload.evaluate(model, *fields))
    values = sum(each.numel() for each in model.factors())
    return _outcome(total, count, adapter_values=values)


def _outcome(held_out: Sums, samples: int, **more: Any) -> SeedOutcome:
    loss, accuracy = held_out.loss / held_out.samples, held_out.score / held_out.samples
    return SeedOutcome(loss, accuracy, samples, **more)


def _batches(indices: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


@torch.no_grad()
def _assign(factors: Sequence[nn.Parameter], values: Iterator[Tensor] | Sequence[Tensor]) -> None:
    for factor, value in zip(factors, values, strict=True):
        factor.copy_(value)


def run_seed(order: SeedOrder) -> SeedOutcome:
    """Train one seed of one way."""
    world = chosen_world(Choices(world=order.world, job=order.job, seed=order.seed))
    spec = required_job(world)
    spec = replace(
        spec,
        options={**spec.options, "adapter_seed": order.seed},
        inner=replace(spec.inner, learning_rate=order.learning_rate),
    )
    data_dir = Path(order.job).parent / spec.data.path
    workload: CausalLmWorkload = build_for_job(find(spec.workload), spec.options, str(data_dir))
    if order.way != PLANNED:
        return PlainJob(spec, workload, data_dir, order).train()
    with tempfile.TemporaryDirectory() as folder:
        training_plan = PlannedTraining(workload, str(data_dir), Path(folder))
        outcome = training_plan.run(replace(world, job=spec))
    return _outcome(
        outcome.held_out,
        outcome.samples,
        bytes_both_ways=outcome.bytes_both_ways,
        steps=outcome.steps,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    orders = msgspec.json.decode(sys.argv[1], type=list[SeedOrder])
    outcomes = msgspec.json.encode([run_seed(each) for each in orders])
    sys.stdout.write(outcomes.decode() + "\n")
