"""The workload ``program``: a model and its loss that came as data, run call by call with torch.

The calls are torch's own operators, as an eager model would make them, so that autograd, autocast
and every device work alike.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hypergpu.programs.container import (
    CONSTANT,
    TENSORS_PATH,
    Argument,
    Graph,
    OperatorCall,
    Program,
    ProgramError,
    read_program,
    value_numbers,
)
from hypergpu.programs.operators import OPERATORS, SIZES
from hypergpu.programs.sample_files import FieldsError, wanted_arrays
from hypergpu.programs.samples import SamplesError, read_samples
from hypergpu.tensors.layout import TensorKind
from hypergpu.workloads.entry import Options
from hypergpu.workloads.workload import NO_SAMPLES, Dataset, DatasetError, NodeDataError, Sums

_PLAN_BATCH = 4
_BYTES_MOST = 1 << 38
"""Bytes of one result with a small batch, beyond which no machine that we know could train."""


def function_of(name: str) -> Callable[..., Any]:
    """The function of an allowed operator.

    Raises:
        ProgramError: This version of torch has no such operator.
    """
    space, _, rest = name.partition(".")
    if name in SIZES:
        found: Callable[..., Any] = getattr(operator, rest)
        return found
    base, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space), base), overload)
    except AttributeError:
        raise ProgramError(
            f"torch {torch.__version__} here has no operator {name}: install a newer one"
        ) from None
    return found


def lacking_operators() -> tuple[str, ...]:
    """Operators of programs that this version of torch has not."""
    lacking = []
    for name in sorted(OPERATORS):
        try:
            function_of(name)
        except ProgramError:
            lacking.append(name)
    return tuple(lacking)


class _Slot(NamedTuple):
    """Place of an argument that is known at the call only."""

    number: int


class _DeviceSlot(NamedTuple):
    """Place of the device that the program runs on."""


def _plain(argument: Argument) -> Any:
    """An argument as torch takes it; slots where a value belongs."""
    if isinstance(argument, list | tuple):
        return [_plain(each) for each in argument]
    if not isinstance(argument, dict):
        return argument
    ((key, value),) = argument.items()
    if key == "value":
        return _Slot(value)
    if key == "device":
        return _DeviceSlot()
    return float(value) if key == "number" else getattr(torch, value)


def _fill(argument: Any, values: Sequence[Any], device: torch.device) -> Any:
    kind = type(argument)
    if kind is _Slot:
        return values[argument.number]
    if kind is list:
        return [_fill(each, values, device) for each in argument]
    return device if kind is _DeviceSlot else argument


class _Step(NamedTuple):
    """A call made ready."""

    function: Callable[..., Any]
    arguments: list[Any]
    named: dict[str, Any]
    is_graded: bool
    dead: tuple[int, ...]
    """Values that no later call needs."""

    def run(self, values: list[Any], device: torch.device) -> Any:
        arguments = [_fill(each, values, device) for each in self.arguments]
        named = {key: _fill(each, values, device) for key, each in self.named.items()}
        if self.is_graded:
            return self.function(*arguments, **named)
        with torch.no_grad():
            return self.function(*arguments, **named)


class ReadyGraph:
    """A graph with its functions looked up.

    Raises:
        ProgramError: torch lacks an operator.
    """

    def __init__(self, graph: Graph, inputs_count: int) -> None:
        self._calls = graph.calls
        self._outputs = graph.outputs
        dead = _last_uses(graph, inputs_count)
        self._steps = [_ready(call, dead[number]) for number, call in enumerate(graph.calls)]

    def run(
        self, inputs: Sequence[Tensor], device: torch.device, check: Callable[[Any], None] | None
    ) -> list[Tensor]:
        """The outputs.

        Args:
            inputs: The program's tensors, then the batch's fields.
            device: Where they are.
            check: Looks at each result; None: nobody does.
        """
        values: list[Any] = list(inputs)
        for step in self._steps:
            value = step.run(values, device)
            if check is not None:
                check(value)
            values.append(value)
            for number in step.dead:
                values[number] = None
        return [values[number] for number in self._outputs]

    def check(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Run it on tensors that hold nothing, and refuse what torch refuses.

        Raises:
            ProgramError: A call fails, a result is too large, or the loss is no number.
        """
        done = 0

        def count(value: Any) -> None:
            nonlocal done
            _check_size(value)
            done += 1

        try:
            outputs: list[Any] = self.run(inputs, torch.device("meta"), count)
        except Exception as error:  # torch raises anything for wrong arguments
            operator_name = self._calls[min(done, len(self._calls) - 1)].operator
            text = str(error).partition("\n")[0][:300]
            raise ProgramError(f"{name}, call {done} ({operator_name}): {text}") from error
        for output in outputs:
            if not isinstance(output, Tensor) or output.numel() != 1:
                raise ProgramError(f"{name}: loss and metrics must be single numbers")


def _ready(call: OperatorCall, dead: tuple[int, ...]) -> _Step:
    function = function_of(call.operator)
    named = {key: _plain(each) for key, each in call.named.items()}
    if _creates(function):
        # Where the program runs, also when it is only checked.
        named["device"] = _DeviceSlot()
    arguments = [_plain(each) for each in call.arguments]
    return _Step(function, arguments, named, call.is_graded, dead)


def _creates(function: Callable[..., Any]) -> bool:
    """Whether an operator makes a tensor of plain values alone."""
    if not isinstance(function, torch._ops.OpOverload):  # noqa: SLF001 - it has no public name
        return False
    given = {each.name: str(each.type) for each in function._schema.arguments}  # noqa: SLF001
    return "device" in given and not any("Tensor" in each for each in given.values())


def _last_uses(graph: Graph, inputs_count: int) -> list[tuple[int, ...]]:
    """For each call the results that are used there for the last time."""
    last: dict[int, int] = {}
    for number, call in enumerate(graph.calls):
        last[inputs_count + number] = number
        for value in value_numbers([*call.arguments, *call.named.values()]):
            last[value] = number
    found: list[list[int]] = [[] for _ in graph.calls]
    for value, number in last.items():
        if value >= inputs_count and value not in graph.outputs:
            found[number].append(value)
    return [tuple(each) for each in found]


def _check_size(value: Any) -> None:
    parts = value if isinstance(value, list | tuple) else [value]
    for part in parts:
        if isinstance(part, Tensor) and part.numel() * part.element_size() > _BYTES_MOST:
            raise ProgramError(f"a result of shape {tuple(part.shape)} is too large")


class ProgramModule(nn.Module):
    """A program's tensors under their names, trained ones as parameters."""

    def __init__(self, program: Program, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = [each.name for each in program.tensors]
        for each in program.tensors:
            self._place(each.name, each.role, tensors[each.name].clone())

    def tensors(self) -> list[Tensor]:
        """All tensors, in the program's order."""
        named: dict[str, Tensor] = dict(self.named_parameters())
        named.update(self.named_buffers())
        return [named[name] for name in self._names]

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
        hypergpu.workloads.workload.DatasetError: It holds no program that may run here.
    """

    def __init__(self, folder: Path, label: str = "") -> None:
        try:
            self._program = read_program(folder)
            self._fields, self._train, self._held_out = read_samples(folder, label)
            if self._fields != self._program.fields:
                raise ProgramError("the fields of program and samples differ")
            self._tensors = _read_tensors(folder, self._program)
            count = self._program.inputs_count
            self._graphs = {
                True: ReadyGraph(self._program.train, count),
                False: ReadyGraph(self._program.evaluate, count),
            }
            self._check()
        except (ProgramError, SamplesError) as refused:
            raise DatasetError(f"the program cannot run: {refused}") from refused
        self.metric = next(iter(self._program.metrics), "loss")
        self.operators = self._program.operators
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
        except FieldsError as refused:
            raise NodeDataError(str(refused)) from refused
        except SamplesError as broken:
            raise DatasetError(str(broken)) from broken

    def model(self) -> nn.Module:
        """The model as it was given; nothing is drawn at random."""
        return ProgramModule(self._program, self._tensors)

    def loss(self, model: nn.Module, *fields: Tensor) -> Tensor:
        """See `TorchWorkload`."""
        return self._run(model, fields)[0]

    def evaluate(self, model: nn.Module, *fields: Tensor) -> Sums:
        """See `TorchWorkload`."""
        count = len(fields[0])
        loss, *metrics = [float(each) * count for each in self._run(model, fields)]
        named = dict(zip(self._program.metrics, metrics, strict=True))
        return Sums(loss, metrics[0] if metrics else loss, count, named)

    def _run(self, model: nn.Module, fields: Sequence[Tensor]) -> list[Tensor]:
        if not isinstance(model, ProgramModule):
            raise TypeError(f"{type(model).__name__} is no model of a program")
        inputs = [*model.tensors(), *fields]
        return self._graphs[model.training].run(inputs, fields[0].device, None)

    def _check(self) -> None:
        tensors = [each.to("meta") for each in self._tensors.values()]
        fields = [
            torch.empty((_PLAN_BATCH, *each.shape), dtype=getattr(torch, each.dtype), device="meta")
            for each in self._fields
        ]
        for name, graph in (("train", self._graphs[True]), ("evaluate", self._graphs[False])):
            graph.check(name, [*tensors, *fields])


class FieldSamples:
    """Samples of a node's own, in memory. Implements `Samples`.

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
        found: dict[str, Tensor] = load_file(folder / TENSORS_PATH)
    except (OSError, SafetensorError) as broken:
        raise ProgramError(f"{TENSORS_PATH} cannot be read: {broken}") from broken
    for each in program.tensors:
        wanted = (each.shape, getattr(torch, each.dtype))
        tensors = [found[each.name]] if each.name in found else []
        if [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != [wanted]:
            raise ProgramError(f"{TENSORS_PATH}: tensor {each.name} is not as the program says")
    return {each.name: found[each.name] for each in program.tensors}


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


def exported_state(folder: Path) -> dict[str, Tensor]:
    """Tensors by name of the model in an export's folder."""
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found
