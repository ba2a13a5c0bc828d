"""Training torch workloads with reproducible results: on a CPU the same start and batches give the
same bits.
"""

from collections.abc import Sequence
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
from gpu_node.shell.worker.torch_optimizer import TorchOptimizer
from gpu_node.shell.worker.trainer import DeviceMemory, InitialState, ShardError, Trainer
from hypergpu.optimizer import pass_sizes
from hypergpu.tensors.layout import Flat
from hypergpu.units import Bytes
from hypergpu.workloads.datasets import SampleSource
from hypergpu.workloads.entry import WorkloadEntry
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.networks.graph_runner import lacking_operators
from hypergpu.workloads.networks.measuring import measure_module
from hypergpu.workloads.networks.task import (
    CheckpointedModule,
    CountedLoss,
    Device,
    TorchWorkload,
    chosen_device,
    load_module,
    module_initial,
    smallest_pass,
    store_module,
    workload_layout,
)
from hypergpu.workloads.node_data import training_samples
from hypergpu.workloads.registry import build_for_job
from hypergpu.workloads.workload import MixtureWorkload


class TorchTrainer:
    """A module with torch's optimizers. Implements `Trainer`."""

    def __init__(self, workload: TorchWorkload, device: Device, samples: SampleSource) -> None:
        self._workload = workload
        self._device = torch.device(device.kind)
        self._has_bf16 = device.has_bf16
        self.samples = samples
        self._model = workload.model().to(self._device).train()
        self.layout = workload_layout(workload, self._model)
        self._smallest_pass = smallest_pass(self._model)
        self._optimizer = TorchOptimizer(self._model, self._device)
        self._micro_batch = 0
        self.memory = DeviceMemory()

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        torch.manual_seed(start.seed & (2**63 - 1))
        load_module(self._model, self.layout, start.model)
        self._micro_batch = start.rule.micro_batch
        self.memory = DeviceMemory()
        if isinstance(self._model, CheckpointedModule):
            self._model.checkpoint_activations(is_on=start.rule.checkpoints_activations)
        self._optimizer.begin(start.rule, start.optimizer)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> torch.Tensor:
        """See `Trainer`."""
        self._model.zero_grad(set_to_none=True)
        before_bytes = Bytes(0)
        if self._device.type == "cuda" and not self.memory.peak_bytes:
            torch.cuda.reset_peak_memory_stats()
            before_bytes = Bytes(torch.cuda.memory_allocated())
        sizes = pass_sizes(len(indices), self._micro_batch, self._smallest_pass)
        parts = np.split(indices, np.cumsum(sizes)[:-1])
        shares = self._shares(parts)
        losses = [self._add_gradient(*each) for each in zip(parts, shares, strict=True)]
        self._optimizer.step(learning_rate)
        if before_bytes:
            peak_bytes = Bytes(torch.cuda.max_memory_allocated())
            self.memory = DeviceMemory(before_bytes, peak_bytes)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        store_module(self._model, self.layout, out)

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return self._optimizer.state()

    def evaluate(self, samples: SampleSource, samples_most: int = 0) -> Sums:
        """Measure the model as it is now on samples that are held out."""
        self._model.eval()
        sums = measure_module(self._workload, self._model, samples, samples_most)
        self._model.train()
        return sums

    def _shares(self, parts: Sequence[NDArray[np.int64]]) -> list[float]:
        """What the mean of each part counts in the mean of the batch."""
        counts = [len(part) for part in parts]
        if len(parts) > 1 and isinstance(self._workload, CountedLoss):
            counts = [self._workload.loss_count(*self.samples.batch(part)) for part in parts]
        return [count / sum(counts) for count in counts]

    def _add_gradient(self, indices: NDArray[np.int64], share: float) -> torch.Tensor:
        """Add a part of the batch's gradient; the part's loss times its share of the batch."""
        fields = [torch.from_numpy(array).to(self._device) for array in self.samples.batch(indices)]
        with self._autocast():
            loss = self._workload.loss(self._model, *fields)
        if share != 1:
            loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[object]:
        if not self._has_bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)


_LACKING_MOST = 100
"""With a torch that lacks more operators a node offers no programs: what it says has a limit."""


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
        self._memory_bytes = Bytes(limits.memory_of(self._device.memory_bytes))
        if self._memory_bytes < self._device.memory_bytes:
            if self._device.kind == "cuda":
                share = self._memory_bytes / self._device.memory_bytes
                torch.cuda.set_per_process_memory_fraction(share)
            else:
                cap_memory(limits._replace(memory_bytes=self._memory_bytes))

    def capabilities(self, kind: str, workloads: dict[str, int]) -> WorkerCapabilities:
        """The device, once it has computed something."""
        missing_operators = lacking_operators()
        if len(missing_operators) > _LACKING_MOST:
            workloads = {name: each for name, each in workloads.items() if name != "program"}
        return WorkerCapabilities(
            device=self._device.kind,
            device_name=self._device.name,
            memory_bytes=self._memory_bytes,
            kind=kind,
            workloads=workloads,
            torch=str(torch.__version__),
            lacking_operators=missing_operators[:_LACKING_MOST],
        )

    def trainer(self, entry: WorkloadEntry, request: TrainShard) -> Trainer:
        """A trainer of a torch workload."""
        workload: TorchWorkload = build_for_job(entry, request.task.options, request.data_dir)
        if experts := request.task.experts:
            workload = _holding(workload, experts, entry.name)
        samples = training_samples(workload, request.data_dir, request.node_dir)
        return TorchTrainer(workload, self._device, samples)

    def initial_model(self, entry: WorkloadEntry, request: WriteInitialModel) -> Flat:
        """The first model of a job with a torch workload."""
        workload: TorchWorkload = build_for_job(entry, request.options, request.data_dir)
        return module_initial(workload.model, request.seed)


def _holding(workload: TorchWorkload, experts: Sequence[int], name: str) -> TorchWorkload:
    """The workload with some experts only.

    Raises:
        ShardError: It is no mixture here.
    """
    if not isinstance(workload, MixtureWorkload):
        raise ShardError(
            f"the job's nodes hold some experts of {name}, which is no mixture here."
            " Fix: install the same versions on the node and the coordinator"
        )
    part: TorchWorkload = workload.holding(experts)  # type: ignore[assignment]
    return part
