"""Makes programs: traces a torch module and its loss by `torch.export`, and writes what that gives
as a container.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import GraphModule

from hypergpu.programs.checks import check_program
from hypergpu.programs.container import (
    CONSTANT,
    PROGRAM_PATH,
    RULES_VERSION,
    TENSORS_PATH,
    VERSION,
    EvaluateAll,
    Field,
    Program,
    ProgramError,
    ProgramTensor,
    program_bytes,
    value_numbers,
)
from hypergpu.programs.ties import Tie, tie_of
from hypergpu.tensors.layout import TensorKind
from hypergpu.units import several
from hypergpu.workloads.networks.custom_gradients import GradientRecorder, TracedGradient
from hypergpu.workloads.networks.graph_calls import dtype_name
from hypergpu.workloads.networks.graph_numbering import GraphNumbering, TracedGraph, needed_version
from hypergpu.workloads.networks.rewriting import rewriting, silent_torch
from hypergpu.workloads.networks.source_lines import CodeLine, called_line
from hypergpu.workloads.networks.trace_errors import GuardLines, explain_failure, is_about_size
from hypergpu.workloads.networks.traceable import (
    attribute_states,
    check_memory,
    check_model,
    parameter_hooks,
)
from hypergpu.workloads.networks.whole_set_tracing import WHOLE_SET_GRAPH, TracedWholeSet

Module = nn.Module
State = dict[str, Tensor]
_Batch = dict[str, Tensor] | tuple[Tensor, ...]
Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, batch)``: a mean loss, or that and a dictionary with the means of metrics, or these
and a dictionary of outputs, each with the batch's samples as first dimension.
"""
_EXAMPLES = 4


class _Traced(nn.Module):
    """Model and loss as one module over the fields."""

    def __init__(self, model: nn.Module, measure: "Measure", recorder: GradientRecorder) -> None:
        super().__init__()
        self.model = model
        self._measure = measure
        self._recorder = recorder

    def forward(self, *fields: Tensor) -> tuple[Tensor, ...]:
        with self._recorder.recording(), rewriting():
            self._recorder.hook_parameters(self.model)
            with _assigned_buffers(self.model):
                outputs = self._measure(self.model, fields)
            return (*outputs, *self._recorder.hooked)


@contextmanager
def _assigned_buffers(model: nn.Module) -> Iterator[None]:
    """Write buffers that the block assigns, as ``self.scale = ...`` does, into those before."""
    before = [(name, each, dict(each._buffers)) for name, each in model.named_modules()]  # noqa: SLF001
    yield
    for path, module, buffers in before:
        for key, old in buffers.items():
            new = module._buffers.get(key)  # noqa: SLF001 - as torch.nn.Module's own methods do
            if new is old:
                continue
            name = f"{path}.{key}".removeprefix(".")
            if old is None or new is None or new.shape != old.shape:
                raise ProgramError(
                    f"the forward pass gives the buffer {name} another shape."
                    f" Fix: register it with the shape that it keeps"
                )
            with torch.no_grad():
                old.copy_(new.detach())
            module._buffers[key] = old  # noqa: SLF001


class Measure:
    """A user's loss over fields. torch restores what tracing changes in a module, but not here.

    Args:
        loss: See `Loss`.
        shape: How it gets its batch.
        wants_outputs: Whether evaluation gives outputs besides loss and metrics.
    """

    def __init__(self, loss: Loss, shape: "BatchShape", *, wants_outputs: bool = False) -> None:
        self._loss = loss
        self._shape = shape
        self._wants_outputs = wants_outputs
        self.metrics: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
        result = self._loss(model, self._shape.of(fields))
        loss, metrics, outputs = _parts(result)
        self.metrics = tuple(metrics)
        outputs = outputs if self._wants_outputs and not model.training else {}
        self.outputs = tuple(outputs)
        if self._wants_outputs and not model.training and not outputs:
            raise ProgramError(
                "evaluate_all computes metrics of outputs, and the loss gives none in evaluation."
                ' Fix: return loss, {}, {"scores": logits}'
            )
        return (loss, *metrics.values(), *outputs.values())


def _parts(result: Any) -> tuple[Tensor, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Loss, metrics and outputs of what a loss gives.

    Raises:
        ProgramError: It is something else.
    """
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Tensor):
        is_whole = False
    else:
        is_whole = all(map(_are_tensors, parts[1:]))
    if not is_whole:
        raise ProgramError(
            "the loss gives neither a tensor nor that and metrics, each a tensor, nor these and"
            ' outputs, each a tensor. Fix: return loss, or loss, {"accuracy": mean}, or loss,'
            ' {"accuracy": mean}, {"scores": logits}'
        )
    loss, metrics, outputs = (*parts, {}, {})[:3]
    return loss, metrics, outputs


def _are_tensors(value: Any) -> bool:
    """Whether a part of what a loss gives is tensors by name."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items()
    )


class _NamedFields(dict[str, Tensor]):
    """Fields by name, that say which there are."""

    def __missing__(self, name: object) -> Tensor:
        raise ProgramError(
            f"the batch has no field {str(name)[:60]!r} ({called_line()})."
            f" Fix: take one of {', '.join(self)}"
        )


class _OrderedFields(tuple[Tensor, ...]):
    """Fields in their order, that say how many there are."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        is_wrong = not isinstance(place, int | slice) or (
            isinstance(place, int) and not -len(self) <= place < len(self)
        )
        if is_wrong:
            raise ProgramError(
                f"the batch is a tuple of {several(len(self), 'field')}, and has no"
                f" {str(place)[:60]!r} ({called_line()}). Fix: take batch[0]"
                + f" to batch[{len(self) - 1}]"
                * (len(self) > 1)
            )
        return super().__getitem__(place)


class BatchShape(NamedTuple):
    """How a loss gets its batch."""

    names: tuple[str, ...]
    is_tuple: bool
    """Whether it is a tuple in the order of the names, and no dictionary."""

    def of(self, fields: Sequence[Tensor]) -> _Batch:
        """The batch of these fields."""
        if self.is_tuple:
            return _OrderedFields(fields)
        return _NamedFields(zip(self.names, fields, strict=True))


class TracedProgram(NamedTuple):
    """A program with the first values of its tensors."""

    program: Program
    tensors: dict[str, Tensor]
    lines: Mapping[tuple[str, int], CodeLine] = {}
    """Where the user's code makes a call, by graph and number."""

    def line_of(self, graph: str, tensor: str = "") -> CodeLine | None:
        """Where a graph first uses a tensor; else where it makes its last call."""
        whole = self.program.evaluate_all
        graphs = {"train": self.program.train, "evaluate": self.program.evaluate}
        graphs |= {WHOLE_SET_GRAPH: whole.graph} if whole is not None else {}
        calls = graphs.get(graph, self.program.evaluate).calls
        names = [each.name for each in self.program.tensors]
        place = names.index(tensor) if tensor in names else -1
        users = (
            number
            for number, call in enumerate(calls)
            if place in value_numbers([*call.arguments, *call.named.values()])
        )
        user_lines = (self.lines.get((graph, number)) for number in users)
        last = (self.lines.get((graph, number)) for number in reversed(range(len(calls))))
        return next((line for line in [*user_lines, *last] if line), None)

    def write(self, folder: Path) -> None:
        """Write both into a job's data folder."""
        path = folder / PROGRAM_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(program_bytes(self.program))
        save_file(self.tensors, folder / TENSORS_PATH)


def trace(
    model: nn.Module,
    loss: Loss,
    shape: BatchShape,
    fields: Sequence[Field],
    examples: int = _EXAMPLES,
    whole: TracedWholeSet | None = None,
) -> TracedProgram:
    """Trace a model with its loss, for training and for evaluation.

    Takes seconds, the first time in a process longer. The model is left as it was.

    Args:
        model: Any module that `torch.export` can trace.
        loss: See `Loss`.
        shape: How the loss gets its batch.
        fields: Of one sample.
        examples: Size of the batch that it is traced with, at least 2; the program takes any.
        whole: Metrics of all held-out samples, of outputs that the loss gives in evaluation.

    Raises:
        ProgramError: It cannot be traced, or calls what no program may. The text says what to do.
    """
    check_model(model)
    names = _tensor_names(model)
    with _preserve_model(model), silent_torch():
        traced_graphs = [
            _export(model.train(mode), measure, fields, names, examples)
            for mode, measure in (
                (True, Measure(loss, shape)),
                (False, Measure(loss, shape, wants_outputs=whole is not None)),
            )
        ]
    own_names = frozenset(names.values())
    constants = whole.constants if whole is not None else {}
    numbering = GraphNumbering(traced_graphs, fields, own_names, constants)
    others = {name: each for name, each in numbering.tensors.items() if name not in own_names}
    check_memory(model, others)
    train, evaluate = numbering.graphs
    entries = tuple(
        _entry(model, name, tensor, is_written=name in numbering.written)
        for name, tensor in numbering.tensors.items()
    )
    program = Program(
        version=2,
        tensors=entries,
        fields=tuple(fields),
        train=train,
        evaluate=evaluate,
        metrics=traced_graphs[1].metrics,
        rules=tuple(numbering.rules),
    )
    stored_values = {name: _stored_values(tensor) for name, tensor in numbering.tensors.items()}
    lines = numbering.lines
    if whole is not None:
        _check_names(whole.evaluate_all, traced_graphs[1])
        lines = {**lines, **whole.lines}
    program = _in_least_version(program, whole, has_masks=numbering.has_masks)
    check_program(program)
    return TracedProgram(program, stored_values, lines)


def _in_least_version(
    program: Program, whole: TracedWholeSet | None, *, has_masks: bool
) -> Program:
    """The program in the least version of the container that can hold it."""
    if whole is not None:
        return replace(program, version=VERSION, evaluate_all=whole.evaluate_all)
    return replace(program, version=RULES_VERSION) if has_masks else needed_version(program)


def _check_names(whole: EvaluateAll, evaluation: TracedGraph) -> None:
    """Refuse names of which a user could mean another thing.

    Raises:
        ProgramError: A metric has the name of another, or outputs are not always the same.
    """
    for name in whole.metrics:
        if name in evaluation.metrics:
            raise ProgramError(
                f"evaluate_all and the loss both give a metric called {name}."
                " Fix: rename one, or leave it out of what the loss gives"
            )
    if evaluation.outputs != whole.outputs:
        raise ProgramError(
            f"the loss gives the outputs {', '.join(whole.outputs)} on a batch, and"
            f" {', '.join(evaluation.outputs)} on another. Fix: give the same ones each time"
        )


@contextmanager
def _preserve_model(model: nn.Module) -> Iterator[None]:
    """Leave a model's modes and attributes as they were, whatever a forward pass assigns."""
    states = attribute_states(model)
    try:
        yield
    finally:
        for state in states:
            state.restore()


def _tensor_names(model: nn.Module) -> dict[Tie, str]:
    """The first name of each tensor in the module's state, or else of all."""
    tensors = dict(model.state_dict(keep_vars=True))
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    names: dict[Tie, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            names.setdefault(tie_of(tensor), name)
    return names


def _stored_values(tensor: Tensor) -> Tensor:
    """A tensor's values as they are sent; of complex ones, real and imaginary parts."""
    values = tensor.detach().cpu()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return values.clone().contiguous()


def _entry(model: nn.Module, name: str, tensor: Tensor, *, is_written: bool) -> ProgramTensor:
    real_tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
    role = _role(model, name, tensor, is_written=is_written)
    return ProgramTensor(name, tuple(real_tensor.shape), dtype_name(real_tensor.dtype), role)


def _role(model: nn.Module, name: str, tensor: Tensor, *, is_written: bool) -> str:
    """Role of a tensor: what training changes is averaged, or counted; so is a state's float32."""
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        return TensorKind.PARAMETER.value
    is_float = tensor.is_floating_point() or tensor.is_complex()
    kind = TensorKind.STATISTIC if is_float else TensorKind.INTEGER
    if is_written:
        return kind.value
    is_state = not isinstance(tensor, nn.Parameter) and name in model.state_dict(keep_vars=True)
    is_usual = tensor.dtype in (torch.float32, torch.int64)
    return kind.value if is_state and is_usual else CONSTANT


class _Export(NamedTuple):
    """One mode as torch traced it."""

    module: GraphModule
    signature: Any
    tensors: Mapping[str, Tensor]


def _export(
    model: nn.Module,
    measure: Measure,
    fields: Sequence[Field],
    names: Mapping[Tie, str],
    examples: int,
) -> TracedGraph:
    graph = "train" if model.training else "evaluate"
    recorder = GradientRecorder(parameter_hooks(model))
    traced_module = _Traced(model, measure, recorder)
    device = next(model.parameters()).device
    batch = tuple(
        torch.zeros((examples, *each.shape), dtype=getattr(torch, each.dtype), device=device)
        for each in fields
    )
    export = _run_export(traced_module, batch)
    inputs: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    own: list[str] = []
    for spec in export.signature.input_specs:
        argument = str(spec.arg.name)
        if spec.target is None:
            own.append(argument)
            continue
        tensor, name = _original(traced_module, spec.target, export.tensors[spec.target], graph)
        name = names.get(tie_of(tensor), name)
        inputs[argument], tensors[name] = name, tensors.get(name, tensor)
    gradients: list[TracedGradient] = recorder.gradients
    return TracedGraph(
        graph,
        export.module,
        inputs,
        own,
        tensors,
        measure.metrics,
        measure.outputs,
        gradients,
        len(recorder.hooked),
    )


def _run_export(traced: nn.Module, examples: tuple[Tensor, ...]) -> _Export:
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    dynamic = (tuple({0: batch} for _ in examples),)
    guards = GuardLines()
    try:
        with guards.recording():
            exported_program = torch.export.export(
                traced, examples, dynamic_shapes=dynamic, strict=False
            )
    except ProgramError:
        raise
    except Exception as error:  # torch.export raises anything that the model raises
        line = guards.decisive() if is_about_size(error, "batch") else None
        raise explain_failure(error, line) from error
    tensors = {
        **dict(exported_program.named_parameters()),
        **dict(exported_program.named_buffers()),
    }
    tensors |= exported_program.constants
    return _Export(exported_program.graph_module, exported_program.graph_signature, tensors)


def _original(traced: nn.Module, target: str, tensor: Tensor, graph: str) -> tuple[Tensor, str]:
    """The module's own tensor with its name; or the export's, for a constant of the code."""
    owner, _, name = target.rpartition(".")
    try:
        own = getattr(traced.get_submodule(owner), name)
    except AttributeError:
        own = None
    if isinstance(own, Tensor):
        return own, target.removeprefix("model.")
    return tensor, f"constants_{graph}.{target.replace('.', '_')}"
