"""Training torch workloads with reproducible results: on a CPU the same start and batches give the
same bits.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_node.shell.worker.protocol import (
    Limits,
    TrainShard,
    WorkerCapabilities,
    WriteInitialModel,
    cap_memory,
)
from gpu_node.shell.worker.trainer import InitialState, OptimizerState, Trainer
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.workloads.entry import WorkloadEntry
from hypergpu.workloads.networks.task import (
    Device,
    TorchWorkload,
    chosen_device,
    load_module,
    module_initial,
    module_layout,
    store_module,
)
from hypergpu.workloads.workload import Samples, build

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TorchTrainer:
    """A module with torch's AdamW. Implements `Trainer`."""

    def __init__(self, workload: TorchWorkload, device: Device, samples: Samples) -> None:
        self._workload = workload
        self._device = torch.device(device.kind)
        self._has_bf16 = device.has_bf16
        self.samples = samples
        self._model = workload.model().to(self._device).train()
        self.layout = module_layout(self._model)
        self._adamw = self._fresh_adamw(0.0)

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        torch.manual_seed(start.seed & (2**63 - 1))
        load_module(self._model, self.layout, start.model)
        self._adamw = self._fresh_adamw(start.weight_decay)
        if start.optimizer is not None:
            for name, parameter in self._model.named_parameters():
                if f"step/{name}" in start.optimizer:
                    self._adamw.state[parameter] = self._moments(name, start.optimizer)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> torch.Tensor:
        """See `Trainer`."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        inputs, targets = (
            torch.from_numpy(array).to(self._device) for array in self.samples.batch(indices)
        )
        self._adamw.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._workload.loss(self._model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._adamw.step()
        return loss.detach()

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        store_module(self._model, self.layout, out)

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return {
            f"{moment}/{name}": self._adamw.state[parameter][moment].cpu().numpy()
            for name, parameter in self._model.named_parameters()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def _fresh_adamw(self, weight_decay: float) -> torch.optim.AdamW:
        # In one pass over the parameters on a CPU: half of a small model's step was the passes.
        return torch.optim.AdamW(
            self._model.parameters(),
            weight_decay=weight_decay,
            fused=True if self._device.type == "cpu" else None,
        )

    def _moments(self, name: str, kept: OptimizerState) -> dict[str, torch.Tensor]:
        return {
            moment: torch.tensor(
                kept[f"{moment}/{name}"],
                # AdamW keeps its step counts on the CPU: it reads them to correct the bias.
                device="cpu" if moment == "step" else self._device,
            )
            for moment in _MOMENTS
        }

    def _autocast(self) -> AbstractContextManager[object]:
        if not self._has_bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)


class TorchEngine:
    """Makes trainers and first models of torch workloads."""

    def __init__(self, limits: Limits) -> None:
        torch.set_num_threads(limits.threads)
        self._device = chosen_device()
        if self._device.kind == "cpu":
            # A GPU's deterministic kernels are slower, and equal bits are promised on CPUs only.
            # Other operations, in a workload of another package, warn and run.
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
        self._memory_bytes = self._device.memory_bytes
        if limits.memory_bytes and limits.memory_bytes < self._memory_bytes:
            self._memory_bytes = Bytes(limits.memory_bytes)
            if self._device.kind == "cuda":
                share = limits.memory_bytes / self._device.memory_bytes
                torch.cuda.set_per_process_memory_fraction(share)
            else:
                cap_memory(limits)

    def capabilities(self, kind: str, workloads: dict[str, int]) -> WorkerCapabilities:
        """The device, once it has computed something."""
        return WorkerCapabilities(
            device=self._device.kind,
            device_name=self._device.name,
            memory_bytes=self._memory_bytes,
            kind=kind,
            workloads=workloads,
        )

    def trainer(self, entry: WorkloadEntry, request: TrainShard) -> Trainer:
        """A trainer of a torch workload."""
        workload: TorchWorkload = build(entry, request.task.options)
        return TorchTrainer(workload, self._device, workload.load(request.data_dir).train)

    def initial_model(self, entry: WorkloadEntry, request: WriteInitialModel) -> Flat:
        """The first model of a job with a torch workload."""
        workload: TorchWorkload = build(entry, request.options)
        return module_initial(workload.model, request.seed)
