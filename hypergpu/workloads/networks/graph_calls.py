"""The calls of a traced graph, one after the other, over values that have no numbers yet."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from hypergpu.programs.container import Argument, ProgramError
from hypergpu.programs.operators import CUSTOM_GRADIENT, GRADIENT, REQUIRES_GRAD, SIZES
from hypergpu.workloads.networks.marks import CTC, GRAD, GRADIENTS, REQUIRES, RULE
from hypergpu.workloads.networks.source_lines import CodeLine, traced_line

_INSTEAD = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    # A tensor of one number does as a number does, where it is no size.
    "aten.item.default": "aten.detach.default",
    "aten._local_scalar_dense.default": "aten.detach.default",
    GRAD: GRADIENT,
    REQUIRES: REQUIRES_GRAD,
    CTC: "aten.ctc_loss.Tensor",
}
"""Memory that nobody has written to is zeros in a program."""
_WITHOUT_EFFECT = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata")
_DROPPED = ("pin_memory", "layout", "generator", "path")
_NUMBERS = {
    "sym_float": "number.float",
    "sym_max": "number.max",
    "sym_min": "number.min",
    "_sym_sqrt": "number.sqrt",
    "_sym_log": "number.log",
    "floor": "number.floor",
    "ceil": "number.ceil",
    "trunc": "number.trunc",
    "sqrt": "number.sqrt",
    "log": "number.log",
}
"""Functions of sizes, by the names that torch has for them."""
_SPARSE = "aten.embedding.default"
_INDEX = "aten.index.Tensor"


class Value:
    """A result of a call, or an input of a graph."""


@dataclass(eq=False)
class PendingCall:
    """A call whose arguments hold `Value` where a program's call has its number."""

    operator: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    is_graded: bool = True
    line: CodeLine | None = None
    result: Value = field(default_factory=Value)

    @property
    def values(self) -> Iterator[Value]:
        """Values that it takes."""
        yield from values_of([*self.arguments, *self.named.values()])

    @property
    def is_in_place(self) -> bool:
        """Whether it changes one of its arguments."""
        base = self.operator.partition(".")[2].partition(".")[0]
        return base.endswith("_") and not base.startswith("_")

    @property
    def is_of_sizes(self) -> bool:
        """Whether it computes with sizes alone."""
        return self.operator.startswith("aten.sym_") or (
            self.operator in SIZES and self.operator != "operator.getitem"
        )

    def substitute(self, others: Mapping[Value, Value]) -> None:
        """Take other values in the place of some."""
        self.arguments = tuple(_substitute_in(each, others) for each in self.arguments)
        self.named = {key: _substitute_in(each, others) for key, each in self.named.items()}

    def place(self) -> str:
        """Where the user's code makes it, in brackets."""
        return f" ({self.line})" if self.line else ""


class GradientMark(NamedTuple):
    """Begin of a backward pass, see `custom_gradients`."""

    number: int
    gradients: list[Value]


class RuleMark(NamedTuple):
    """End of a backward pass."""

    number: int
    inputs: list[Value]
    outputs: list[Value]
    gradients: list[Value | None]
    results: list[Value]


Item = PendingCall | GradientMark | RuleMark


def values_of(argument: Any) -> Iterator[Value]:
    """Values that an argument holds."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from values_of(each)


def _substitute_in(argument: Any, others: Mapping[Value, Value]) -> Any:
    if isinstance(argument, Value):
        return others.get(argument, argument)
    if isinstance(argument, list | tuple):
        return [_substitute_in(each, others) for each in argument]
    return argument


class CallList:
    """Collects the calls of a traced graph.

    Args:
        values: What the graph's placeholders stand for.
    """

    def __init__(self, values: dict[Node, Any]) -> None:
        self.items: list[Item] = []
        self._values = values
        self._required: set[Value] = set()
        self._line: CodeLine | None = None
        self.has_masks = False
        """Whether rows are taken by a mask, which version 2 of programs cannot check."""

    def add_graph(self, module: GraphModule, *, is_graded: bool = True) -> list[Any]:
        """Add a graph's calls; returns the values that it gives."""
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._values[each] for each in node.args[0]]
            if node.op == "get_attr":
                self._values[node] = getattr(module, node.target)
            elif node.op == "call_function":
                self._values[node] = self._add_node(node, is_graded=is_graded)
        return []

    def _add_node(self, node: Node, *, is_graded: bool) -> Any:
        name = _operator_name(node)
        if name.startswith(_WITHOUT_EFFECT):
            return None
        if name in {"wrap_with_set_grad_enabled", "wrap_with_autocast"}:
            return self._add_inner(node, is_graded=is_graded)
        if name in {GRADIENTS, RULE}:
            return self._add_mark(name, node)
        if name == "operator.getitem":
            source: Any = node.args[0]
            if isinstance(self._values[source], list):
                return self._values[source][node.args[1]]
        name = _INSTEAD.get(name, name)
        if name == REQUIRES_GRAD and self._is_required(node):
            return None
        keywords = {
            key: self._argument(node, each)
            for key, each in node.kwargs.items()
            if key not in _DROPPED and each is not None
        }
        arguments = [self._argument(node, each) for each in node.args]
        arguments = self._adapt_arguments(name, node, arguments)
        # torch notes no place of some calls; that of the call before is the nearest there is.
        line = self._line = traced_line(node.stack_trace) or self._line
        call = PendingCall(name, tuple(arguments), keywords, is_graded, line)
        self.items.append(call)
        return call.result

    def _adapt_arguments(self, name: str, node: Node, arguments: list[Any]) -> list[Any]:
        """Arguments as programs have them."""
        self.has_masks = self.has_masks or (name == _INDEX and _has_mask(node))
        # Optimizers of nodes take no sparse gradients; dense ones are the same numbers.
        return arguments[:4] if name == _SPARSE else arguments

    def _is_required(self, node: Node) -> bool:
        """Whether gradients of a value are noted already."""
        value = self._argument(node, node.args[0])
        is_required = value in self._required
        self._required.add(value)
        return is_required

    def _add_mark(self, name: str, node: Node) -> list[Value]:
        values = [self._argument(node, each) for each in node.args[:-1]]
        number: Any = node.args[-1]
        results = [Value() for _ in values[0 if name == GRADIENTS else 1]]
        if name == GRADIENTS:
            self.items.append(GradientMark(number, results))
        else:
            inputs, outputs, gradients = values
            self.items.append(RuleMark(number, inputs, outputs, gradients, results))
        return results

    def _add_inner(self, node: Node, *, is_graded: bool) -> list[Any]:
        """Add the calls of a part that runs without gradients, or without autocast."""
        inner: Any
        inner_arguments: list[Any] = list(node.args)
        if _operator_name(node) == "wrap_with_autocast":
            is_on, inner, inner_arguments = (
                bool(inner_arguments[2]),
                inner_arguments[4],
                inner_arguments[5:],
            )
            if is_on:
                line = traced_line(node.stack_trace)
                place = f" ({line})" if line else ""
                raise ProgramError(f"nodes choose autocast themselves{place}. Fix: remove it")
        else:
            is_enabled, inner, inner_arguments = (
                inner_arguments[0],
                inner_arguments[1],
                inner_arguments[2:],
            )
            is_graded = bool(is_enabled)
        module = self._values[inner]
        placeholders = [each for each in module.graph.nodes if each.op == "placeholder"]
        for each, value in zip(placeholders, inner_arguments, strict=True):
            self._values[each] = self._values[value] if isinstance(value, Node) else value
        return self.add_graph(module, is_graded=is_graded)

    def _argument(self, node: Node, given: Any) -> Any:
        if isinstance(given, Node):
            value = self._values[given]
            if isinstance(value, Value | int | float) or value is None:
                return value
            if isinstance(value, list):
                return [*value]
            raise ProgramError(f"a call takes what no program can hold{_place(node)}")
        if isinstance(given, list | tuple):
            return [self._argument(node, each) for each in given]
        if isinstance(given, float) and not math.isfinite(given):
            return {"number": str(given)}
        if given is None or isinstance(given, bool | int | float | str):
            return given
        return _object(node, given)


def _operator_name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - it has no public name
        return str(target)
    name = str(target.__name__)
    if name in dir(operator) and getattr(operator, name) is target:
        return f"operator.{name}"
    return _NUMBERS.get(name, name)


def _has_mask(node: Node) -> bool:
    indices: Any = node.args[1]
    values = (each.meta.get("val") for each in indices if isinstance(each, Node))
    return any(getattr(value, "dtype", None) in (torch.bool, torch.uint8) for value in values)


def _place(node: Node) -> str:
    line = traced_line(node.stack_trace)
    return f" ({line})" if line else ""


def _object(node: Node, given: Any) -> Argument:
    if isinstance(given, torch.dtype):
        return {"dtype": dtype_name(given)}
    if isinstance(given, torch.device):
        return {"device": True}
    if isinstance(given, torch.memory_format):
        return {"memory_format": str(given).removeprefix("torch.")}
    kind = type(given).__name__
    raise ProgramError(f"an argument of type {kind} is not possible{_place(node)}")


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def without_dead(calls: Sequence[PendingCall], outputs: Sequence[Any]) -> list[PendingCall]:
    """Calls whose results something needs, or that change something in place."""
    needed_values = set(values_of(list(outputs)))
    kept_calls: list[PendingCall] = []
    for call in reversed(calls):
        if call.result in needed_values or call.is_in_place:
            kept_calls.append(call)
            needed_values.update(call.values)
    kept_calls.reverse()
    return kept_calls


def part_call(source: PendingCall, number: int, result: Value) -> PendingCall:
    """The call that takes one of several results."""
    return PendingCall("operator.getitem", (source.result, number), {}, result=result)


def rule_call(rule: int, mark: RuleMark, captured: list[Value], line: Any) -> PendingCall:
    """The call that gives a function's outputs its rule."""
    arguments = (rule, list(mark.inputs), list(mark.outputs), captured)
    return PendingCall(CUSTOM_GRADIENT, arguments, {}, line=line)
