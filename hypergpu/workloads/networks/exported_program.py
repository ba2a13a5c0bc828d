"""A trained program in an export's folder: it evaluates without the code of the user's module."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hypergpu.programs.checks import read_program
from hypergpu.programs.container import TENSORS_PATH, Field, ProgramError
from hypergpu.programs.sample_files import wanted_arrays
from hypergpu.programs.samples import SamplesError
from hypergpu.workloads.datasets import NO_SAMPLES, Dataset, DatasetError
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.networks.program import (
    FieldSamples,
    ProgramModule,
    ready_graphs,
    tensors_of,
)
from hypergpu.workloads.networks.program_evaluation import BatchValues, Outputs, ProgramEvaluation


class ExportedProgram:
    """A program with the trained weights beside it.

    Args:
        folder: The export's, with ``program/`` in it.
        model_path: The trained weights.

    Raises:
        DatasetError: It holds no program, or one of another model.
    """

    def __init__(self, folder: Path, model_path: Path) -> None:
        try:
            self._program = read_program(folder)
            tensors = load_file(model_path)
            if any(each.name not in tensors for each in self._program.tensors):
                tensors = {**load_file(folder / TENSORS_PATH), **tensors}
            program_tensors = {each.name: each for each in self._program.tensors}
            self._tensors = {
                name: tensors[name].to(getattr(torch, each.dtype))
                for name, each in program_tensors.items()
            }
            graph = ready_graphs(self._program)[False]
            self._graph = graph
            self._evaluation = ProgramEvaluation(self._program, graph, self._tensors)
        except (ProgramError, OSError) as error:
            raise DatasetError(f"the program in {folder} cannot run: {error}") from error
        except KeyError as error:
            raise DatasetError(
                f"{folder} has no tensor {error}. Fix: export the job into an empty folder"
            ) from error
        self.evaluation_batch = self._program.evaluation_batch
        self.gradient_samples_most = 1

    @property
    def fields(self) -> tuple[Field, ...]:
        """Inputs of every sample."""
        return self._program.fields

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of what `batch_values` gives after the loss."""
        return (*self._program.metrics, *self._program.output_names)

    def batch_values(self, model: nn.Module, fields: Sequence[Tensor]) -> list[Tensor]:
        """Mean loss and metrics of a batch, and its outputs, as the program gives them."""
        return self._graph.run([*tensors_of(model), *fields], fields[0].device)

    def model(self) -> nn.Module:
        """The module, in evaluation mode."""
        return ProgramModule(self._program, self._tensors).eval()

    def load(self, data_dir: str) -> Dataset:
        """Samples of ``.npz`` and ``.parquet`` files with the program's fields, all held out."""
        try:
            arrays = wanted_arrays(Path(data_dir), self._program.fields)
        except SamplesError as error:
            raise DatasetError(str(error)) from error
        return Dataset(NO_SAMPLES, FieldSamples(arrays))

    def evaluate(self, model: nn.Module, *fields: Tensor) -> Sums:
        """Sums of loss and metrics over a batch."""
        return self.measure_batch(model, *fields).sums

    def measure_batch(self, model: nn.Module, *fields: Tensor) -> BatchValues:
        """See `WholeSetWorkload`."""
        return self._evaluation.measure_batch(tensors_of(model), fields)

    def measure_all(self, outputs: Sequence[Outputs]) -> dict[str, float]:
        """See `WholeSetWorkload`."""
        return self._evaluation.measure_all(outputs)


def fields_text(fields: tuple[Field, ...]) -> str:
    """Names, types and shapes, for messages."""
    return ", ".join(f"{each.name} {each.dtype}{list(each.shape)}" for each in fields)
