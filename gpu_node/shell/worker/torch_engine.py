"""Training torch workloads with reproducible results: on a CPU the same start and batches give the
same bits.
"""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.adamw import adamw

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
from hypergpu.workloads.workload import Samples, build_for_job

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
"""AdamW's defaults in torch."""


def _first_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter), torch.zeros(()))
    return dict(zip(_MOMENTS, zeros, strict=True))


class TorchTrainer:
    """A module with torch's AdamW. Implements `Trainer`.

    The optimizer is torch's function, not its class: that one imports torch's compiler, which would
    double the seconds that a worker takes to start.
    """

    def __init__(self, workload: TorchWorkload, device: Device, samples: Samples) -> None:
        self._workload = workload
        self._device = torch.device(device.kind)
        self._has_bf16 = device.has_bf16
        self.samples = samples
        self._model = workload.model().to(self._device).train()
        self.layout = module_layout(self._model)
        self._weight_decay = 0.0
        self._moments: dict[str, dict[str, torch.Tensor]] = {}

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        torch.manual_seed(start.seed & (2**63 - 1))
        load_module(self._model, self.layout, start.model)
        self._weight_decay = start.weight_decay
        self._moments = {}
        if start.optimizer is not None:
            for name, _ in self._model.named_parameters():
                if f"step/{name}" in start.optimizer:
                    self._moments[name] = self._stored_moments(name, start.optimizer)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> torch.Tensor:
        """See `Trainer`."""
        fields = [torch.from_numpy(array).to(self._device) for array in self.samples.batch(indices)]
        self._model.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._workload.loss(self._model, *fields)
        loss.backward()  # type: ignore[no-untyped-call]
        self._update_parameters(learning_rate)
        return loss.detach()

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        store_module(self._model, self.layout, out)

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return {
            f"{moment}/{name}": tensor.cpu().numpy()
            for name, moments in self._moments.items()
            for moment, tensor in moments.items()
        }

    @torch.no_grad()
    def _update_parameters(self, learning_rate: float) -> None:
        """Take a step of AdamW with the gradients that the parameters hold."""
        learnt = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }
        for name, parameter in learnt.items():
            if name not in self._moments:
                self._moments[name] = _first_moments(parameter)
        averages, squares, steps = (
            [self._moments[name][moment] for name in learnt] for moment in _MOMENTS
        )
        adamw(
            list(learnt.values()),
            [parameter.grad for parameter in learnt.values() if parameter.grad is not None],
            averages,
            squares,
            [],
            steps,
            # In one pass over the parameters on a CPU: half of a small model's step was the passes.
            fused=True if self._device.type == "cpu" else None,
            amsgrad=False,
            beta1=_BETA1,
            beta2=_BETA2,
            lr=learning_rate,
            weight_decay=self._weight_decay,
            eps=_EPSILON,
            maximize=False,
        )

    def _stored_moments(self, name: str, kept: OptimizerState) -> dict[str, torch.Tensor]:
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
            # Other operations, in a workload of another package, warn and run. The function
            # `use_deterministic_algorithms` would do the same and import torch's compiler.
            torch.set_deterministic_debug_mode("warn")
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
        workload: TorchWorkload = build_for_job(entry, request.task.options, request.data_dir)
        return TorchTrainer(workload, self._device, workload.load(request.data_dir).train)

    def initial_model(self, entry: WorkloadEntry, request: WriteInitialModel) -> Flat:
        """The first model of a job with a torch workload."""
        workload: TorchWorkload = build_for_job(entry, request.options, "")
        return module_initial(workload.model, request.seed)
