"""The engine of a torch worker: torch with reproducible results, on a device that works."""

import torch

from gpu_node.shell.worker.limits import Limits, cap_memory
from gpu_node.shell.worker.messages import TrainShard, WorkerCapabilities, WriteInitialModel
from gpu_node.shell.worker.torch_trainer import TorchTrainer
from gpu_node.shell.worker.trainer import Trainer
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.workloads.entry import WorkloadEntry
from hypergpu.workloads.networks.device import chosen_device
from hypergpu.workloads.networks.task import TorchWorkload
from hypergpu.workloads.networks.tensors import module_initial
from hypergpu.workloads.registry import build


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
