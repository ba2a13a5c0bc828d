"""The workload ``program``: a model and its loss that came as data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hypergpu.programs.checks import read_program
from hypergpu.programs.container import (
    CONSTANT,
    TENSORS_PATH,
    Program,
    ProgramBoundError,
    ProgramError,
    ProgramMemoryError,
)
from hypergpu.programs.sample_files import FieldsError, wanted_arrays
from hypergpu.programs.samples import SamplesError, read_samples
from hypergpu.tensors.layout import TensorKind
from hypergpu.units import several
from hypergpu.workloads.datasets import NO_SAMPLES, Dataset, DatasetError, NodeDataError
from hypergpu.workloads.entry import Options
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.networks.graph_runner import META, ReadyGraph, ReadyRule
from hypergpu.workloads.networks.memory_bound import AliveBytes
from hypergpu.workloads.networks.program_evaluation import BatchValues, Outputs, ProgramEvaluation
from hypergpu.workloads.networks.program_layers import program_hidden_weights


class ProgramModule(nn.Module):
    """A program's tensors under their names, trained ones as parameters."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.smallest_pass = 1
        """Samples below which the program cannot take a training step."""
        self.hidden_weights = program_hidden_weights(program)
        self._names = [each.name for each in program.tensors]
        for each in program.tensors:
            self._place(each.name, each.role, tensors[each.name].clone())

    def tensors(self) -> list[Tensor]:
        """All tensors, in the program's order."""
        tensors_by_name: dict[str, Tensor] = dict(self.named_parameters())
        tensors_by_name.update(self.named_buffers())
        return [tensors_by_name[name] for name in self._names]

    def _place(self, name: str, role: str, tensor: Tensor) -> None:
        *path, last = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:  # noqa: SLF001 - as torch.nn.Module's own methods do
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if role == TensorKind.PARAMETER.value:
            owner.register_parameter(last, nn.Parameter(tensor))
        else:
            owner.register_buffer(last, tensor, persistent=role != CONSTANT)


class ProgramWorkload:
    """A program with its job's data. Implements `TorchWorkload`.

    Args:
        folder: The job's data folder.
        label: Field that says a sample's class; empty: the only one of whole numbers.

    Raises:
        hypergpu.workloads.datasets.DatasetError: It holds no program that may run here.
    """

    def __init__(self, folder: Path, label: str = "") -> None:
        try:
            self._program = read_program(folder)
            self._fields, self._train, self._held_out = read_samples(folder, label)
            if self._fields != self._program.fields:
                raise ProgramError("the fields of program and samples differ")
            self._tensors = _read_tensors(folder, self._program)
            self._reason = ""
            self._graphs = ready_graphs(self._program)
            self._evaluation = ProgramEvaluation(self._program, self._graphs[False], self._tensors)
            self._smallest_pass = self._check()
        except (ProgramError, SamplesError) as error:
            raise DatasetError(f"the program cannot run: {error}") from error
        self.metric = next(iter(self._program.metric_names), "loss")
        self.operators = self._program.operators
        self.version = self._program.version
        self.evaluation_batch = self._program.evaluation_batch
        self.gradient_samples_most = len(self._held_out.labels)

    def load(self, data_dir: str) -> Dataset:
        """See `Workload`."""
        if self._train is None:
            raise DatasetError("the job's data hold no training samples: these stay on nodes")
        return Dataset(self._train, self._held_out)

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        return Dataset(NO_SAMPLES, self._held_out)

    def node_samples(self, data_dir: str, node_dir: str) -> "FieldSamples":
        """All samples of ``.npz`` and ``.parquet`` files with the program's fields."""
        try:
            return FieldSamples(wanted_arrays(Path(node_dir), self._fields))
        except FieldsError as error:
            raise NodeDataError(str(error)) from error
        except SamplesError as error:
            raise DatasetError(str(error)) from error

    def model(self) -> nn.Module:
        """The model as it was given; nothing is drawn at random."""
        model = ProgramModule(self._program, self._tensors)
        model.smallest_pass = self._smallest_pass
        return model

    def loss(self, model: nn.Module, *fields: Tensor) -> Tensor:
        """See `TorchWorkload`.

        Raises:
            ProgramError: A micro-batch is smaller than the program can take.
        """
        if model.training and len(fields[0]) < self._smallest_pass:
            count = several(len(fields[0]), "sample")
            raise ProgramError(
                f"a micro-batch of {count} is too small: {self._reason}."
                f" Fix: inner.micro_batch = {self._smallest_pass}"
            )
        return self._run(model, fields)[0]

    def mean_values(self, model: nn.Module, *fields: Tensor) -> list[Tensor]:
        """Mean loss, metrics and outputs of a batch, as the model's mode computes them."""
        return self._run(model, fields)

    def evaluate(self, model: nn.Module, *fields: Tensor) -> Sums:
        """See `TorchWorkload`."""
        return self.measure_batch(model, *fields).sums

    def measure_batch(self, model: nn.Module, *fields: Tensor) -> BatchValues:
        """See `WholeSetWorkload`."""
        return self._evaluation.measure_batch(tensors_of(model), fields)

    def measure_all(self, outputs: Sequence[Outputs]) -> dict[str, float]:
        """See `WholeSetWorkload`."""
        return self._evaluation.measure_all(outputs)

    def check_evaluation(self, most_bytes: int | None = None) -> None:
        """Bound what an evaluation of all held-out samples takes, before any is computed.

        Args:
            most_bytes: Memory for its results; None: this machine's.

        Raises:
            DatasetError: It would take more, or a call fails. The text says what to do.
        """
        try:
            self._check_evaluation(most_bytes)
        except ProgramError as error:
            raise DatasetError(f"the program cannot be evaluated: {error}") from error

    def _check_evaluation(self, most_bytes: int | None) -> None:
        count = len(self._held_out.labels)
        size = min(self._program.evaluation_batch, count)
        try:
            outputs = self._try(size, is_training=False, most=most_bytes)
        except ProgramMemoryError as error:
            fix = "Fix: a smaller batch_size, which evaluates fewer samples at once"
            raise ProgramMemoryError(f"{error}. {fix}", error.call) from error
        self._evaluation.check_all(outputs, count, most_bytes)

    def _run(self, model: nn.Module, fields: Sequence[Tensor]) -> list[Tensor]:
        inputs = [*tensors_of(model), *fields]
        return self._graphs[model.training].run(inputs, fields[0].device)

    def _check(self) -> int:
        """Run both graphs without data, with the batches that a job has.

        Returns:
            The least samples of a training step.

        Raises:
            ProgramError: A call fails, or a result is too large.
        """
        at_once = self._program.evaluation_batch
        count = len(self._held_out.labels)
        for size in dict.fromkeys((min(at_once, count), count % at_once)):
            if size:
                self._try(size, is_training=False)
        self._try(at_once, is_training=True)
        for size in (1, 2):
            self._is_possible(size, is_training=False)
        sizes = [1 << exponent for exponent in range(at_once.bit_length())]
        possible = (size for size in sizes if self._is_possible(size, is_training=True))
        return next(possible, at_once)

    def _is_possible(self, size: int, *, is_training: bool) -> bool:
        """Whether a batch can be so small: a loss over pairs, for one, needs two samples."""
        try:
            self._try(size, is_training=is_training)
        except ProgramBoundError:
            raise
        except ProgramError as error:
            self._reason = str(error.__cause__)
            return False
        return True

    def _try(self, size: int, *, is_training: bool, most: int | None = None) -> list[Tensor]:
        """Run a graph without data; gives the outputs of the batch, on the meta device."""
        tensors = [each.to(META) for each in self._tensors.values()]
        fields = [
            torch.empty((size, *each.shape), dtype=getattr(torch, each.dtype), device=META)
            for each in self._fields
        ]
        alive = AliveBytes() if most is None else AliveBytes(most, "this process")
        try:
            outputs = self._graphs[is_training].try_run([*tensors, *fields], alive)
        except ProgramError as error:
            raise type(error)(f"{error}, with a batch of {size}", error.call) from error
        count = 1 if is_training else 1 + len(self._program.metrics)
        for output in outputs[:count]:
            if not isinstance(output, Tensor) or output.numel() != 1:
                name = "train" if is_training else "evaluate"
                raise ProgramError(f"{name}: loss and metrics must be single numbers")
        for name, output in zip(self._program.output_names, outputs[count:], strict=False):
            if not isinstance(output, Tensor) or tuple(output.shape[:1]) != (size,):
                shape = list(output.shape) if isinstance(output, Tensor) else "no tensor"
                raise ProgramError(
                    f"evaluate: the output {name} is {shape} of a batch of {size}, and must have"
                    " its samples as first dimension"
                )
        return outputs[count:]


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All tensors of a program's model, in the program's order."""
    if not isinstance(model, ProgramModule):
        raise TypeError(f"{type(model).__name__} is no model of a program")
    return model.tensors()


def ready_graphs(program: Program) -> dict[bool, ReadyGraph]:
    """Its graphs by whether they train."""
    count = program.inputs_count
    rules = [ReadyRule(number, rule) for number, rule in enumerate(program.rules)]
    return {
        True: ReadyGraph("train", program.train, count, rules),
        False: ReadyGraph("evaluate", program.evaluate, count, rules),
    }


class FieldSamples:
    """Samples of a node's own, in memory. Implements `SampleSource`.

    Args:
        arrays: Values of each field, in the program's order.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = arrays
        self.labels: NDArray[np.int64] = np.zeros(len(arrays[0]), np.int64)

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Values of each field, in the order of ``indices``."""
        return tuple(array[indices] for array in self._arrays)


def _read_tensors(folder: Path, program: Program) -> dict[str, Tensor]:
    try:
        stored_tensors: dict[str, Tensor] = load_file(folder / TENSORS_PATH)
    except (OSError, SafetensorError) as error:
        raise ProgramError(f"{TENSORS_PATH} cannot be read: {error}") from error
    for each in program.tensors:
        expected_form = (each.shape, getattr(torch, each.dtype))
        tensors = [stored_tensors[each.name]] if each.name in stored_tensors else []
        if [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != [expected_form]:
            raise ProgramError(f"{TENSORS_PATH}: tensor {each.name} is not as the program says")
    return {each.name: stored_tensors[each.name] for each in program.tensors}


class ProgramBuilder(NamedTuple):
    """Builds the workload of each job. Implements `JobWorkload`."""

    label: str

    def for_job(self, data_dir: str) -> ProgramWorkload:
        """See `JobWorkload`."""
        if not data_dir:
            raise DatasetError("a program comes with its job's data, and there are none")
        return ProgramWorkload(Path(data_dir), self.label)


def program(options: Options) -> ProgramBuilder:
    """Builder of ``program``."""
    return ProgramBuilder(str(options["label"]))


def as_before(trained: Any, before: Any) -> Any:
    """A trained tensor of the type that it has in the user's module; else what was there before."""
    if not isinstance(trained, Tensor) or not isinstance(before, Tensor):
        return before
    if before.is_complex() and not trained.is_complex():
        trained = torch.view_as_complex(trained.contiguous())
    return trained.to(before.dtype)


def exported_state(folder: Path) -> dict[str, Tensor]:
    """Tensors by name of the model in an export's folder."""
    state: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return state
