"""Measures a module on held-out samples, alike beside the coordinator and on a node."""

import torch
from torch import nn

from hypergpu.partitions import Indices
from hypergpu.workloads.datasets import SampleSource
from hypergpu.workloads.evaluation import EvaluationTotals, Sums, evaluation_batches
from hypergpu.workloads.networks.task import TorchWorkload
from hypergpu.workloads.workload import LargeSamplesWorkload


def measured_batches(
    workload: TorchWorkload, samples: SampleSource, samples_most: int
) -> list[Indices]:
    """Indices of samples as a workload is evaluated on them; ``samples_most`` 0: all."""
    if isinstance(workload, LargeSamplesWorkload):
        return evaluation_batches(samples, samples_most, workload.evaluation_batch)
    return evaluation_batches(samples, samples_most)


@torch.inference_mode()
def measure_module(
    workload: TorchWorkload, model: nn.Module, samples: SampleSource, samples_most: int = 0
) -> Sums:
    """Loss and metrics of a module, which is in evaluation mode, on the module's device.

    Args:
        workload: Of the module.
        model: With the values that are measured.
        samples: Held-out samples.
        samples_most: So many of them at most, spread evenly; 0: all.
    """
    device = next(model.parameters()).device
    totals = EvaluationTotals(workload)
    for batch in measured_batches(workload, samples, samples_most):
        totals.add(model, *(torch.from_numpy(array).to(device) for array in samples.batch(batch)))
    return totals.sums()
