"""Writes the evaluation of an export's program as an ONNX file, and compares both on one batch.

The file takes a batch of the program's fields and gives what evaluation gives: the loss, the
metrics and the outputs of the batch, by their names. Batches may have any size.
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hypergpu.workloads.networks.exported_program import ExportedProgram

_ERROR_MOST = 1e-4
"""Largest difference from torch, relative to the largest number of an output."""
_BATCHES = (5, 8)
"""Samples that both compute: one size was traced, and the other shows that any goes."""
_OPERATOR = re.compile(r"\b(?:aten|prims)(?:\.|::)\w+")
_REASON_LENGTH_MOST = 300
_LOSS = "loss"


class OnnxRefusalError(Exception):
    """The program is not written as ONNX. The text names the operator, or the difference."""


class WrittenOnnx(NamedTuple):
    """A file that was written."""

    path: Path
    outputs: tuple[str, ...]
    largest_error: float
    """Largest difference from torch on the batches that were compared."""


class EvaluatedProgram(nn.Module):
    """A program's evaluation of a batch as a module."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.model = program.model()
        self._program = program

    def forward(self, *fields: Tensor) -> tuple[Tensor, ...]:
        """Loss, metrics and outputs of a batch."""
        values = self._program.batch_values(self.model, fields)
        return tuple(value.reshape(()) if value.numel() == 1 else value for value in values)


def write_onnx(export: Path, path: Path, data_dir: str) -> WrittenOnnx:
    """Write the program of an export.

    Args:
        export: What `hypergpu job export` wrote.
        path: The file, replaced where it is there.
        data_dir: Folder of samples, of which two batches are compared.

    Raises:
        OnnxRefusalError: It cannot be written, or computes something else.
        DatasetError: The export or the samples cannot be read.
    """
    program = ExportedProgram(export, export / "model.safetensors")
    module = EvaluatedProgram(program).eval()
    names = (_LOSS, *program.value_names)
    batches = [_batch(program, data_dir, size) for size in _BATCHES]
    part = path.with_name(f".{path.name}.part")
    try:
        _write(module, [torch.from_numpy(each) for each in batches[-1]], part, names, program)
        largest_error = max(_error(module, part, batch, program) for batch in batches)
        if not largest_error <= _ERROR_MOST:
            raise OnnxRefusalError(
                f"as ONNX the program gives other numbers, by {largest_error:.1g} of the largest"
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return WrittenOnnx(path, names, largest_error)


def _batch(program: ExportedProgram, data_dir: str, size: int) -> list[NDArray[np.generic]]:
    samples = program.load(data_dir).test
    count = len(samples.labels)
    if count < max(_BATCHES):
        raise OnnxRefusalError(
            f"{count} samples are too few to compare: {max(_BATCHES)} are needed"
        )
    return list(samples.batch(np.arange(size)))


def _write(
    module: nn.Module,
    batch: Sequence[Tensor],
    path: Path,
    names: Sequence[str],
    program: ExportedProgram,
) -> None:
    size = torch.export.Dim("batch", min=2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                tuple(batch),
                path,
                input_names=[field.name for field in program.fields],
                output_names=list(names),
                dynamic_shapes={"fields": tuple({0: size} for _ in batch)},
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # torch raises anything for what it cannot translate
        raise OnnxRefusalError(_refusal(error)) from error


def _refusal(error: BaseException) -> str:
    """The text of a refusal, with the operator where one is named anywhere."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    operators = [name for text in texts for name in _OPERATOR.findall(text)]
    if operators:
        return f"the operator {operators[-1].replace('::', '.')} is not written as ONNX"
    line = next((line for line in texts[-1].splitlines() if line.strip()), type(error).__name__)
    return f"the program is not written as ONNX: {line[:_REASON_LENGTH_MOST]}"


@torch.inference_mode()
def _error(
    module: nn.Module, path: Path, batch: list[NDArray[np.generic]], program: ExportedProgram
) -> float:
    """Largest difference of an output, relative to its largest number."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {each.name: each for each in session.get_inputs()}
    fields = {
        field.name: array
        for field, array in zip(program.fields, batch, strict=True)
        if field.name in inputs
    }
    theirs = session.run(None, fields)
    ours = module(*map(torch.from_numpy, batch))
    errors = [
        float(np.abs(mine.numpy().astype(np.float64) - other).max())
        / max(1e-6, float(np.abs(mine.numpy()).max()))
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return max(errors)
