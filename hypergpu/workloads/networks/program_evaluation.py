"""What a program's evaluation gives: sums over batches, and metrics over all samples together."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hypergpu.programs.container import (
    EVALUATE_ALL_BYTES_MOST,
    OUTPUTS_BYTES_MOST,
    EvaluateAll,
    Program,
    ProgramError,
    ProgramMemoryError,
)
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.networks.graph_runner import META, ReadyGraph
from hypergpu.workloads.networks.memory_bound import AliveBytes

Outputs = list[Tensor]
"""Outputs of a batch, in the program's order, on the CPU."""
_CPU = torch.device("cpu")


class BatchValues(NamedTuple):
    """What an evaluation gives of one batch."""

    sums: Sums
    outputs: Outputs


class ProgramEvaluation:
    """Evaluates by a program's graphs.

    Args:
        program: The program, checked.
        graph: Its graph of evaluation.
        tensors: Its tensors by name.
    """

    def __init__(self, program: Program, graph: ReadyGraph, tensors: Mapping[str, Tensor]) -> None:
        self._program = program
        self._graph = graph
        self._tensors = tensors

    def measure_batch(self, tensors: Sequence[Tensor], fields: Sequence[Tensor]) -> BatchValues:
        """Sums and outputs of a batch.

        Args:
            tensors: The program's, in its order.
            fields: A batch's, on the same device.
        """
        count, metrics = len(fields[0]), self._program.metrics
        loss, *values = self._graph.run([*tensors, *fields], fields[0].device)
        means = [float(each) * count for each in values[: len(metrics)]]
        outputs = [each.detach().cpu() for each in values[len(metrics) :]]
        metric_means = dict(zip(metrics, means, strict=True))
        total = float(loss) * count
        return BatchValues(Sums(total, means[0] if means else total, count, metric_means), outputs)

    def measure_all(self, outputs: Sequence[Outputs]) -> dict[str, float]:
        """Metrics of all samples together by name; none where the program has none.

        Args:
            outputs: Of each batch.
        """
        if self._program.evaluate_all is None:
            return {}
        whole, graph = self._whole
        joined_outputs = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
        constants = [self._tensors[name].cpu() for name in whole.constants]
        values = graph.run([*joined_outputs, *constants], _CPU)
        return dict(zip(whole.metrics, map(float, values), strict=True))

    def check_all(self, outputs: Sequence[Tensor], count: int, most: int | None = None) -> None:
        """Bound what `measure_all` takes, without data.

        Args:
            outputs: Of one batch, on the meta device.
            count: Samples that are measured.
            most: Bytes that the results may take; None: `EVALUATE_ALL_BYTES_MOST`.

        Raises:
            ProgramError: A call fails, or gives no single number for a metric.
            ProgramMemoryError: Outputs or results are too large.
        """
        if self._program.evaluate_all is None:
            return
        whole, graph = self._whole
        total = sum(each[0].numel() * each.element_size() for each in outputs) * count
        if total > OUTPUTS_BYTES_MOST:
            raise ProgramMemoryError(
                f"the outputs of {count:,} held-out samples take {_mebibytes(total)}, and"
                f" evaluate_all takes {_mebibytes(OUTPUTS_BYTES_MOST)}. Fix: give smaller outputs,"
                " such as a score for each sample, or fewer samples held_out"
            )
        wholes = [each.new_empty((count, *each.shape[1:])) for each in outputs]
        constants = [self._tensors[name].to(META) for name in whole.constants]
        most = EVALUATE_ALL_BYTES_MOST if most is None else min(most, EVALUATE_ALL_BYTES_MOST)
        try:
            values = graph.try_run([*wholes, *constants], AliveBytes(most, "evaluate_all"))
        except ProgramMemoryError as error:
            raise ProgramMemoryError(
                f"{error}, with {count:,} held-out samples. Fix: sort in place of comparing each"
                " sample with each, or give fewer samples held_out",
                error.call,
            ) from error
        except ProgramError as error:
            raise type(error)(f"{error}, with {count:,} samples", error.call) from error
        for name, value in zip(whole.metrics, values, strict=True):
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ProgramError(f"evaluate_all: its metric {name} must be a single number")

    @cached_property
    def _whole(self) -> tuple[EvaluateAll, ReadyGraph]:
        """The metrics over all samples. Only who evaluates has it."""
        whole = self._program.evaluate_all
        if whole is None:
            raise ProgramError("the program has no metrics over all samples")
        return whole, ReadyGraph("evaluate_all", whole.graph, whole.inputs_count)


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
