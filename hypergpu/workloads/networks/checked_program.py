"""Traces a model, writes its program beside a job's samples, and compares the two on a batch."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from hypergpu.programs.container import ProgramError
from hypergpu.programs.samples import JobFiles, read_samples
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.networks.agreement import check_agreement
from hypergpu.workloads.networks.module_under_test import ModuleUnderTest
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.traceable import check_model
from hypergpu.workloads.networks.tracing import BatchShape, TracedProgram, trace
from hypergpu.workloads.networks.whole_set_agreement import check_whole_set
from hypergpu.workloads.networks.whole_set_tracing import (
    EvaluateAllFunction,
    run_whole_set,
    trace_whole_set,
)

_EVALUATED_MOST = 256
"""What fits into memory with gradients is evaluated at once, and never more."""
_COMPARED_MOST = 32
"""Samples of the batch on which program and module are compared: enough for statistics of a batch,
and a small part of a step where batches are large.
"""


class UserCode(NamedTuple):
    """What a user gave `hypergpu.train` to trace."""

    model: nn.Module
    """On any device. It is left as it was."""
    loss: Any
    evaluate_all: EvaluateAllFunction | None = None


def write_checked_program(
    folder: Path, code: UserCode, shape: BatchShape, *, batch_size: int, label: str = ""
) -> TracedProgram:
    """Write a model's program beside the samples in a job's folder.

    Takes the time of a trace, and of two training steps and two evaluations of at most 32 samples.

    Args:
        folder: The job's, with its samples.
        code: As of `hypergpu.train`.
        shape: How the loss gets its batch.
        batch_size: Samples of a training step.
        label: Field that says a sample's class, see `label_field`.

    Raises:
        ProgramError: The model cannot be traced, or its program computes otherwise.
    """
    model, loss, evaluate_all = code
    check_loss(loss, shape)
    check_model(model)
    files = read_samples(folder, label)
    batch = _first_batch(files, min(batch_size, _COMPARED_MOST))
    wants_outputs = evaluate_all is not None
    module_under_test = ModuleUnderTest(model, loss, shape, batch, wants_outputs=wants_outputs)
    module_step = module_under_test.step()
    whole = None
    if evaluate_all is not None:
        run_whole_set(evaluate_all, module_step.outputs)
        # With another size than the compared ones, so that none is fixed; so below.
        several = {name: torch.cat([each] * 3) for name, each in module_step.outputs.items()}
        whole = trace_whole_set(evaluate_all, several)
    traced_program = trace(model, loss, shape, files.fields, len(batch[0]) + 1, whole)
    at_once = min(_EVALUATED_MOST, batch_size)
    traced_program = traced_program._replace(
        program=replace(traced_program.program, evaluation_batch=at_once)
    )
    traced_program.write(folder)
    workload = _load_program(folder, label, traced_program)
    check_agreement(module_under_test, module_step, traced_program, workload)
    if evaluate_all is not None:
        check_whole_set(evaluate_all, module_step.outputs, traced_program, workload)
    return traced_program


def check_loss(loss: Any, shape: BatchShape) -> None:
    """Refuse a loss that takes outputs and targets, as those of torch do.

    Raises:
        ProgramError: It is one; the fix is written with the batch's own fields.
    """
    module = str(getattr(loss, "__module__", ""))
    if not isinstance(loss, _Loss) and not (module.startswith("torch.") and callable(loss)):
        return
    name = f"nn.{type(loss).__name__}()" if isinstance(loss, nn.Module) else f"F.{loss.__name__}"
    field_texts = [
        f"batch[{number if shape.is_tuple else repr(field)}]"
        for number, field in enumerate(shape.names)
    ]
    target = field_texts[-1]
    raise ProgramError(
        f"{name} takes an output and a target, and a loss here takes the model and a batch."
        f" Fix: loss=lambda model, batch: {name}(model({field_texts[0]}), {target})"
    )


def _first_batch(files: JobFiles, count: int) -> list[Tensor]:
    """Samples spread evenly over the data, so that all classes in turn are among them."""
    samples = files.train or files.held_out
    sample_count = min(count, samples.count)
    indices = np.linspace(0, samples.count - 1, sample_count).round().astype(np.int64)
    return [torch.from_numpy(np.array(each)) for each in samples.batch(indices)]


def _load_program(folder: Path, label: str, traced: TracedProgram) -> ProgramWorkload:
    """The program as nodes will have it, so that what they would refuse is told here."""
    try:
        workload = ProgramWorkload(folder, label)
        # The limit of the coordinator is not known here; it is looked at there, before training.
        workload.check_evaluation()
    except DatasetError as error:
        cause = error.__cause__
        call = cause.call if isinstance(cause, ProgramError) else None
        line = traced.lines.get(call or ("", 0)) or traced.line_of(call[0] if call else "train")
        raise ProgramError(f"this model would be refused ({line}): {cause}") from error
    return workload
