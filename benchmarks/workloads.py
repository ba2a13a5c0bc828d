"""A step of a traced program beside the same eager model, and what tracing and loading take; what
people write in models, as a program and as a module; what
leaving data on nodes costs in accuracy; partial replicas of a mixture; a job of a billion
parameters; an adapter beside one
machine and FlowerTune's loop.

Steps take the same samples from memory, with gradients and without an optimizer.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.ours.table import BenchmarkParts, PartFigures
from benchmarks.ours.workloads.billion import billion_figures
from benchmarks.ours.workloads.experts.figures import expert_figures
from benchmarks.ours.workloads.first_job import pip_figures
from benchmarks.ours.workloads.own_constructs import own_figures
from benchmarks.ours.workloads.own_data import own_data_figures
from hypergpu.programs.samples import SampleWriter
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.tracing import BatchShape, Loss, trace


class TransformerShape(NamedTuple):
    """Sizes of a GPT."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int


class DigitsNetwork(nn.Module):
    """Two convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class CausalTransformer(nn.Module):
    """GPT-2's shape, with its head tied to the embedding."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(torch.zeros(shape.length, shape.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                shape.width,
                shape.heads,
                4 * shape.width,
                dropout=0.1,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden_state = self.embedding(x) + self.places[:length]
        mask = torch.full((length, length), -torch.inf, device=x.device).triu(1)
        for block in self.blocks:
            hidden_state = block(hidden_state, src_mask=mask, is_causal=True)
        return F.linear(self.norm(hidden_state), self.embedding.weight)


def image_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of classes."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def text_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of the next token."""
    logits = model(batch["x"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())


class StepCase(NamedTuple):
    """A model with a batch."""

    key: str
    model: nn.Module
    loss: Loss
    batch: dict[str, np.ndarray[Any, Any]]
    repeats: int


class StepSeconds(NamedTuple):
    """What one case took."""

    key: str
    parameters: int
    eager_s: float
    program_s: float
    export_s: float
    load_s: float

    @property
    def ratio(self) -> float:
        """A program's step over an eager one."""
        return self.program_s / self.eager_s


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts."""
    return BenchmarkParts(
        title="Workloads",
        columns=("", "beside it", "ours", "ratio", ""),
        parts={
            "steps": partial(step_figures, is_quick=is_quick),
            "own": partial(own_figures, is_quick=is_quick),
            "pip": pip_figures,
            "private": partial(own_data_figures, is_quick=is_quick),
            "billion": partial(billion_figures, is_quick=is_quick),
            "lora": partial(_adapter_figures, is_quick=is_quick),
            "bases": partial(_base_figures, is_quick=is_quick),
            "lora_real": partial(_real_adapter_figures, is_quick=is_quick),
            "experts": partial(expert_figures, is_quick=is_quick),
        },
    )


def _adapter_figures(*, is_quick: bool) -> PartFigures:
    from benchmarks.ours.workloads.lora import lora_figures  # Takes transformers a while to import.

    return lora_figures(is_quick=is_quick)


def _base_figures(*, is_quick: bool) -> PartFigures:
    from benchmarks.ours.workloads.bases import base_figures

    return base_figures(is_quick=is_quick)


def _real_adapter_figures(*, is_quick: bool) -> PartFigures:
    from benchmarks.ours.workloads.lora import lora_real_figures

    return lora_real_figures(is_quick=is_quick)


def step_figures(*, is_quick: bool) -> PartFigures:
    """A step of a program beside the eager model's, measured with each model."""
    torch.set_num_threads(1)
    step_results = [measure_case(case) for case in cases(is_quick)]
    rows = [
        [
            f"{each.key}, {each.parameters / 1e6:.1f}M parameters",
            f"{1000 * each.eager_s:.1f} ms",
            f"{1000 * each.program_s:.1f} ms",
            f"{each.ratio:.3f}",
            f"traced in {each.export_s:.1f} s, loaded in {each.load_s:.2f} s",
        ]
        for each in step_results
    ]
    metrics = {f"program_step_over_eager_{each.key}": each.ratio for each in step_results}
    metrics |= {"export_s": step_results[-1].export_s, "load_s": step_results[-1].load_s}
    notes = (
        "Steps: one thread; loss and gradients, no optimizer. Medians; both take turns.",
        "The first trace of a process includes the import of torch's compiler.",
    )
    return PartFigures(rows=rows, metrics=metrics, notes=notes)


def cases(is_quick: bool) -> list[StepCase]:
    """The models; the large one in full runs only."""
    draw = np.random.default_rng(0)
    images: dict[str, np.ndarray[Any, Any]] = {
        "x": draw.random((32, 64), np.float32),
        "y": draw.integers(0, 10, 32),
    }
    small = TransformerShape(256, 256, 4, 4, 128)
    texts = {"x": draw.integers(0, 256, (8, 128))}
    case_list = [
        StepCase("cnn", DigitsNetwork(), image_loss, images, 60),
        StepCase("gpt", CausalTransformer(small), text_loss, texts, 15),
    ]
    if not is_quick:
        large = TransformerShape(50_257, 768, 12, 12, 128)
        tokens = {"x": draw.integers(0, 50_257, (2, 128))}
        case_list.append(StepCase("gpt2", CausalTransformer(large), text_loss, tokens, 5))
    return case_list


def measure_case(case: StepCase) -> StepSeconds:
    """Trace a model, load its program, and let both take steps in turn."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writer = SampleWriter(folder)
        fields = writer.write_part("train", [case.batch])
        writer.write_part("held_out", [case.batch])
        writer.close()
        started_s = time.perf_counter()
        shape = BatchShape(tuple(case.batch), is_tuple=False)
        trace(case.model, case.loss, shape, fields).write(folder)
        traced_s = time.perf_counter()
        workload = ProgramWorkload(folder)
        copy = workload.model().train()
        loaded_s = time.perf_counter()
        batch = {name: torch.from_numpy(array) for name, array in case.batch.items()}
        model = case.model.train()
        eager_s, program_s = alternate(
            case.repeats,
            lambda: take_step(model, case.loss(model, batch)),
            lambda: take_step(copy, workload.loss(copy, *batch.values())),
        )
    parameters = sum(each.numel() for each in model.parameters())
    times = (eager_s, program_s, traced_s - started_s, loaded_s - traced_s)
    return StepSeconds(case.key, parameters, *times)


def take_step(model: nn.Module, loss: Tensor) -> None:
    """Compute the gradients of a loss, and drop them."""
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def alternate(
    repeats: int, one: Callable[[], None], other: Callable[[], None]
) -> tuple[float, float]:
    """Median CPU seconds of both, by turns, after one of each that is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for work, cpu_times_s in zip((one, other), seconds, strict=True):
            started_s = time.process_time()
            work()
            cpu_times_s.append(time.process_time() - started_s)
    return median(seconds[0][1:]), median(seconds[1][1:])
