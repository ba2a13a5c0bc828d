"""Makes programs: traces a torch module and its loss by `torch.export`, and writes what it found as
a container.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from hypergpu.programs.container import (
    CONSTANT,
    PROGRAM_PATH,
    TENSORS_PATH,
    Argument,
    Field,
    Graph,
    OperatorCall,
    Program,
    ProgramError,
    ProgramTensor,
    check_program,
    program_bytes,
    value_numbers,
)
from hypergpu.programs.operators import OPERATORS
from hypergpu.tensors.layout import TensorKind

Module = nn.Module
State = dict[str, Tensor]
Batch = dict[str, Tensor] | tuple[Tensor, ...]
Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, batch)``: a mean loss, or that and a dictionary with the means of metrics."""
_INSTEAD = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""Memory that nobody has written to is zeros in a program."""
_WITHOUT_EFFECT = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata")
_DROPPED = ("pin_memory", "layout", "generator")


class _Traced(nn.Module):
    """Model and loss as one module over the fields."""

    def __init__(self, model: nn.Module, measure: "_Measure") -> None:
        super().__init__()
        self.model = model
        self._measure = measure

    def forward(self, *fields: Tensor) -> tuple[Tensor, ...]:
        return self._measure(self.model, fields)


class _Measure:
    """A user's loss over fields. torch restores what tracing changes in a module, but not here."""

    def __init__(self, loss: Loss, shape: "BatchShape") -> None:
        self._loss = loss
        self._shape = shape
        self.metrics: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = self._loss(model, self._shape.of(fields))
        if isinstance(found, Tensor):
            return (found,)
        if not (isinstance(found, tuple) and len(found) == 2 and _are_metrics(found[1])):
            raise ProgramError(
                "the loss gives neither a tensor nor that and metrics, each a tensor."
                ' Fix: return loss, or loss, {"accuracy": mean}'
            )
        self.metrics = tuple(found[1])
        return (found[0], *found[1].values())


def _are_metrics(found: Any) -> bool:
    """Whether a part of what a loss gives is tensors by name."""
    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    )


class BatchShape(NamedTuple):
    """How a loss gets its batch."""

    names: tuple[str, ...]
    is_tuple: bool
    """Whether it is a tuple in the order of the names, and no dictionary."""

    def of(self, fields: Sequence[Tensor]) -> Batch:
        """The batch of these fields."""
        return tuple(fields) if self.is_tuple else dict(zip(self.names, fields, strict=True))


class TracedProgram(NamedTuple):
    """A program with the first values of its tensors."""

    program: Program
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write both into a job's data folder."""
        path = folder / PROGRAM_PATH
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(program_bytes(self.program))
        save_file(self.tensors, folder / TENSORS_PATH)


def trace(
    model: nn.Module, loss: Loss, shape: BatchShape, fields: Sequence[Field]
) -> TracedProgram:
    """Trace a model with its loss, for training and for evaluation.

    Takes seconds, the first time in a process longer. The model is left as it was.

    Args:
        model: Any module that `torch.export` can trace.
        loss: See `Loss`.
        shape: How the loss gets its batch.
        fields: Of one sample.

    Raises:
        ProgramError: It cannot be traced, or calls what no program may. The text says what to do.
    """
    _check_model(model)
    modes = {each: each.training for each in model.modules()}
    try:
        made = [_export(model.train(mode), loss, shape, fields) for mode in (True, False)]
    finally:
        for each, mode in modes.items():
            each.training = mode
    names = list(dict.fromkeys(name for each in made for name in each.tensors))
    tensors = {name: next(e.tensors[name] for e in made if name in e.tensors) for name in names}
    entries = tuple(
        ProgramTensor(name, tuple(tensor.shape), _dtype(tensor.dtype), _role(model, name, tensor))
        for name, tensor in tensors.items()
    )
    train, evaluate = (_number_calls(each, names, len(fields)) for each in made)
    train = _without_dead(Graph(train.calls, train.outputs[:1]), len(names) + len(fields))
    program = Program(
        tensors=entries,
        fields=tuple(fields),
        train=train,
        evaluate=evaluate,
        metrics=made[1].metrics,
    )
    check_program(program)
    stored = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return TracedProgram(program, stored)


def _check_model(model: nn.Module) -> None:
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise ProgramError("the model has no parameter that requires a gradient")
    if wrong := next((each.dtype for each in trained if each.dtype != torch.float32), None):
        raise ProgramError(f"parameters are {wrong}, not float32. Fix: model.float()")


def _role(model: nn.Module, name: str, tensor: Tensor) -> str:
    """Role of a tensor by its name: what the module's state holds is averaged, or kept."""
    if isinstance(tensor, nn.Parameter):
        return TensorKind.PARAMETER.value if tensor.requires_grad else CONSTANT
    if name not in model.state_dict(keep_vars=True):
        return CONSTANT
    if tensor.dtype == torch.float32:
        return TensorKind.STATISTIC.value
    return TensorKind.INTEGER.value if tensor.dtype == torch.int64 else CONSTANT


class _Exported(NamedTuple):
    """One traced mode, with values under the names that torch gave them."""

    graph: GraphModule
    inputs: dict[str, str]
    """Names of placeholders to names of tensors."""
    fields: list[str]
    tensors: dict[str, Tensor]
    metrics: tuple[str, ...]


def _export(model: nn.Module, loss: Loss, shape: BatchShape, fields: Sequence[Field]) -> _Exported:
    measure = _Measure(loss, shape)
    traced = _Traced(model, measure)
    device = next(model.parameters()).device
    examples = tuple(
        torch.zeros((4, *each.shape), dtype=getattr(torch, each.dtype), device=device)
        for each in fields
    )
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    try:
        found = torch.export.export(
            traced, examples, dynamic_shapes=(tuple({0: batch} for _ in fields),), strict=False
        )
    except ProgramError:
        raise
    except Exception as error:  # torch.export raises anything that the model raises
        raise ProgramError(_explain(error)) from error
    # Tied tensors have several names, and one value.
    canonical: dict[int, str] = {}
    inputs, tensors, own = {}, {}, []
    held = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    for spec in found.graph_signature.input_specs:
        argument = str(spec.arg.name)
        if spec.target is None:
            own.append(argument)
            continue
        tensor = held[spec.target] if spec.target in held else found.constants[spec.target]
        known = _original(traced, spec.target, tensor)
        name = canonical.setdefault(id(known), spec.target.removeprefix("model."))
        inputs[argument], tensors[name] = name, known
    return _Exported(found.graph_module, inputs, own, tensors, measure.metrics)


def _original(traced: nn.Module, target: str, tensor: Tensor) -> Tensor:
    """The module's own tensor of that name; the export's, for a constant."""
    owner, _, name = target.rpartition(".")
    try:
        found = getattr(traced.get_submodule(owner), name)
    except AttributeError:
        return tensor
    return found if isinstance(found, Tensor) else tensor


def _explain(error: Exception) -> str:
    """What could not be traced, where, and what to do."""
    text = str(error).strip() or type(error).__name__
    first = next((line for line in text.splitlines() if line.strip()), text)[:300]
    fix = "compute with torch's operators on tensors only; no Python that depends on values"
    if "batch" in text and ("specialized" in text or "onstraint" in text):
        fix = "the model or loss fixes the batch size; use x.shape[0] or -1 in its place"
    elif "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        fix = "it decides in Python by a tensor's values; use torch.where, or masks"
    return f"the model cannot be traced: {type(error).__name__}: {first}. Fix: {fix}"


class _Numbering:
    """Numbers of the values of one graph, and its calls so far."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.calls: list[OperatorCall] = []

    def add(self, call: OperatorCall) -> int:
        """Number of the call's result."""
        self.calls.append(call)
        return self._first + len(self.calls) - 1


def _number_calls(exported: _Exported, names: Sequence[str], fields_count: int) -> Graph:
    values: dict[Node, Any] = {}
    numbering = _Numbering(len(names) + fields_count)
    for node in exported.graph.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in exported.inputs:
            values[node] = names.index(exported.inputs[node.name])
        else:
            values[node] = len(names) + exported.fields.index(node.name)
    outputs = _add_calls(exported.graph, values, numbering, is_graded=True)
    graph = Graph(tuple(numbering.calls), tuple(outputs))
    return _without_dead(graph, len(names) + fields_count)


def _add_calls(
    module: GraphModule, values: dict[Node, Any], numbering: _Numbering, *, is_graded: bool
) -> list[Any]:
    """Add a graph's calls; returns the values that it gives."""
    for node in module.graph.nodes:
        if node.op == "output":
            return [values[each] for each in node.args[0]]
        if node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "call_function":
            values[node] = _add_call(node, values, numbering, is_graded=is_graded)
    return []


def _add_call(
    node: Node, values: dict[Node, Any], numbering: _Numbering, *, is_graded: bool
) -> Any:
    name = _operator(node)
    if name.startswith(_WITHOUT_EFFECT):
        return None
    if name in {"wrap_with_set_grad_enabled", "wrap_with_autocast"}:
        return _add_inner(node, values, numbering, is_graded=is_graded)
    if name == "operator.getitem":
        source: Any = node.args[0]
        if isinstance(values[source], list):
            return values[source][node.args[1]]
    name = _INSTEAD.get(name, name)
    if name not in OPERATORS:
        raise ProgramError(f"the model calls {name}, which no program may{_place(node)}")
    named = {
        key: _argument(node, each, values)
        for key, each in node.kwargs.items()
        if key not in _DROPPED and each is not None
    }
    arguments = tuple(_argument(node, each, values) for each in node.args)
    return numbering.add(OperatorCall(name, arguments, named, is_graded))


def _add_inner(
    node: Node, values: dict[Node, Any], numbering: _Numbering, *, is_graded: bool
) -> list[Any]:
    """Add the calls of a part that runs without gradients, or without autocast."""
    inner: Any
    given: list[Any] = list(node.args)
    if _operator(node) == "wrap_with_autocast":
        is_on, inner, given = bool(given[2]), given[4], given[5:]
        if is_on:
            raise ProgramError(f"remove torch.autocast: nodes choose it themselves{_place(node)}")
    else:
        is_enabled, inner, given = given[0], given[1], given[2:]
        is_graded = is_graded and bool(is_enabled)
    module = values[inner]
    placed = [each for each in module.graph.nodes if each.op == "placeholder"]
    own = {each: values[value] for each, value in zip(placed, given, strict=True)}
    return _add_calls(module, own, numbering, is_graded=is_graded)


def _operator(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - it has no public name
        return str(target)
    if target.__name__ in dir(operator) and getattr(operator, target.__name__) is target:
        return f"operator.{target.__name__}"
    return str(target.__name__)


def _place(node: Node) -> str:
    """Where in the user's code the call is, as far as torch tells."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if "File" in line]
    return f" ({lines[-1]})" if lines else ""


def _argument(node: Node, given: Any, values: Mapping[Node, Any]) -> Argument:
    if isinstance(given, Node):
        number = values[given]
        if not isinstance(number, int):
            raise ProgramError(f"a call takes what no program can hold{_place(node)}")
        return {"value": number}
    if isinstance(given, list | tuple):
        return [_argument(node, each, values) for each in given]
    if isinstance(given, float) and not math.isfinite(given):
        return {"number": str(given)}
    if given is None or isinstance(given, bool | int | float | str):
        return given
    return _object(node, given)


def _object(node: Node, given: Any) -> Argument:
    if isinstance(given, torch.dtype):
        return {"dtype": _dtype(given)}
    if isinstance(given, torch.device):
        return {"device": True}
    if isinstance(given, torch.memory_format):
        return {"memory_format": str(given).removeprefix("torch.")}
    raise ProgramError(f"an argument of type {type(given).__name__} is not possible{_place(node)}")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_dead(graph: Graph, inputs_count: int) -> Graph:
    """The graph without calls whose results nothing needs and that change nothing in place."""
    needed = set(graph.outputs)
    kept: list[int] = []
    for number in reversed(range(len(graph.calls))):
        call = graph.calls[number]
        base = call.operator.split(".")[1]
        if inputs_count + number in needed or (base.endswith("_") and base[0] != "_"):
            kept.append(number)
            needed.update(value_numbers([*call.arguments, *call.named.values()]))
    kept.reverse()
    places = {inputs_count + old: inputs_count + new for new, old in enumerate(kept)}
    places.update({number: number for number in range(inputs_count)})
    calls = tuple(_renumber(graph.calls[number], places) for number in kept)
    return Graph(calls, tuple(places[each] for each in graph.outputs))


def _renumber(call: OperatorCall, places: Mapping[int, int]) -> OperatorCall:
    def move(argument: Argument) -> Argument:
        if isinstance(argument, dict) and "value" in argument:
            return {"value": places[argument["value"]]}
        if isinstance(argument, list):
            return [move(each) for each in argument]
        return argument

    named = {key: move(each) for key, each in call.named.items()}
    return OperatorCall(call.operator, tuple(map(move, call.arguments)), named, call.is_graded)
