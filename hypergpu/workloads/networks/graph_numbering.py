"""Gives the calls of two traced graphs their numbers, and finds what they change."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from torch import Tensor
from torch.fx import GraphModule, Node

from hypergpu.programs.container import (
    CONSTANT,
    RULES_VERSION,
    Argument,
    BackwardRule,
    Field,
    Graph,
    OperatorCall,
    Program,
    ProgramError,
)
from hypergpu.programs.operators import OPERATORS, OPERATORS_2
from hypergpu.tensors.layout import TensorKind
from hypergpu.workloads.networks.custom_gradients import TracedGradient
from hypergpu.workloads.networks.graph_calls import CallList, PendingCall, Value, without_dead
from hypergpu.workloads.networks.rule_extraction import RuleExtraction
from hypergpu.workloads.networks.source_lines import CodeLine
from hypergpu.workloads.networks.trace_errors import operator_refusal
from hypergpu.workloads.networks.value_writes import written_inputs


class TracedGraph(NamedTuple):
    """One traced mode, with values under the names that torch gave them."""

    name: str
    """``train`` or ``evaluate``."""
    module: GraphModule
    inputs: dict[str, str]
    """Names of placeholders to names of tensors."""
    fields: list[str]
    tensors: dict[str, Tensor]
    metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    """Names of what evaluation gives besides loss and metrics."""
    gradients: list[TracedGradient]
    hooked: int
    """Outputs that are there for hooks alone."""


class GraphNumbering:
    """Both graphs of a program, numbered.

    Args:
        graphs: As torch traced them.
        fields: Of one sample.
        own_names: Names of the model's parameters and buffers.
        others: Further tensors of the program, by name.

    Raises:
        ProgramError: A graph calls what no program may, or changes what is no part of the model.
    """

    def __init__(
        self,
        graphs: Sequence[TracedGraph],
        fields: Sequence[Field],
        own_names: Collection[str],
        others: Mapping[str, Tensor],
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        for graph in graphs:
            for name, tensor in graph.tensors.items():
                self.tensors.setdefault(name, tensor)
        self.tensors.update(others)
        self.written: set[str] = set()
        """Names of tensors that training changes in place."""
        self.has_masks = False
        """Whether rows are taken by a mask."""
        self.lines: dict[tuple[str, int], CodeLine] = {}
        self._fields_count = len(fields)
        self._own_names = own_names
        self._rule_extraction = RuleExtraction(number_calls)
        self.graphs = [self._number(graph) for graph in graphs]

    @property
    def rules(self) -> list[BackwardRule]:
        """Gradients of the user's own."""
        return self._rule_extraction.rules

    def _number(self, graph: TracedGraph) -> Graph:
        inputs = {name: Value() for name in self.tensors}
        fields = [Value() for _ in range(self._fields_count)]
        calls, values = self._complex_calls(inputs)
        nodes: dict[Node, Any] = {
            node: values[graph.inputs[node.name]]
            if node.name in graph.inputs
            else fields[graph.fields.index(node.name)]
            for node in graph.module.graph.nodes
            if node.op == "placeholder"
        }
        call_list = CallList(nodes)
        outputs = call_list.add_graph(graph.module)
        self.has_masks = self.has_masks or call_list.has_masks
        calls += self._rule_extraction.extract(call_list.items, graph.gradients, outputs)
        has_more = graph.name != "train"
        count = 1 + (len(graph.metrics) + len(graph.outputs)) * has_more
        outputs = outputs[:count]
        calls = without_dead(calls, outputs)
        self._note_writes(calls, inputs, is_training=graph.name == "train")
        numbers = {value: number for number, value in enumerate([*inputs.values(), *fields])}
        numbered_calls = number_calls(calls, numbers)
        for number, call in enumerate(calls):
            if call.line:
                self.lines[graph.name, number] = call.line
        return Graph(numbered_calls, tuple(_number_of(each, numbers) for each in outputs))

    def _complex_calls(
        self, inputs: Mapping[str, Value]
    ) -> tuple[list[PendingCall], dict[str, Value]]:
        """Calls that make complex tensors of their real and imaginary parts; all by name."""
        calls, values = [], dict(inputs)
        for name, tensor in self.tensors.items():
            if tensor.is_complex():
                call = PendingCall("aten.view_as_complex.default", (inputs[name],), {})
                calls.append(call)
                values[name] = call.result
        return calls, values

    def _note_writes(
        self, calls: Sequence[PendingCall], inputs: Mapping[str, Value], *, is_training: bool
    ) -> None:
        writes = written_inputs(calls, inputs.values())
        for name, value in inputs.items():
            call = writes.get(value)
            if call is None:
                continue
            if name not in self._own_names:
                raise ProgramError(
                    f"the forward pass changes {name} in place{call.place()}, and it is no buffer"
                    f' of the model. Fix: self.register_buffer("{name.rpartition(".")[2]}", ...)'
                )
            if is_training:
                self.written.add(name)


def number_calls(
    calls: Sequence[PendingCall], numbers: dict[Value, int], subject: str = "the model"
) -> tuple[OperatorCall, ...]:
    """Calls with the numbers of their values; ``numbers`` has those of the inputs, and gets all.

    Raises:
        ProgramError: ``subject`` calls what no program may.
    """
    numbered_calls = []
    for call in calls:
        if call.operator not in OPERATORS:
            raise operator_refusal(call, subject)
        arguments = tuple(_argument(each, numbers) for each in call.arguments)
        keywords = {key: _argument(each, numbers) for key, each in call.named.items()}
        numbered_calls.append(OperatorCall(call.operator, arguments, keywords, call.is_graded))
        numbers[call.result] = len(numbers)
    return tuple(numbered_calls)


def _argument(argument: Any, numbers: Mapping[Value, int]) -> Argument:
    if isinstance(argument, Value):
        return {"value": numbers[argument]}
    if isinstance(argument, list | tuple):
        return [_argument(each, numbers) for each in argument]
    return argument


def _number_of(output: Any, numbers: Mapping[Value, int]) -> int:
    if not isinstance(output, Value):
        raise ProgramError("the loss depends on no tensor. Fix: return a tensor computed of them")
    return numbers[output]


def needed_version(program: Program) -> Program:
    """The program with the least version of the container that can hold it, so that nodes with an
    older HyperGPU can still train it.
    """
    is_old = (
        not program.rules
        and set(program.operators) <= OPERATORS_2
        and all(_is_old_tensor(each.role, each.dtype) for each in program.tensors)
        and all(
            _is_old_argument(argument)
            for graph in program.graphs
            for call in graph.calls
            for argument in (*call.arguments, *call.named.values())
        )
    )
    return program if is_old else replace(program, version=RULES_VERSION)


def _is_old_tensor(role: str, dtype: str) -> bool:
    usual = {TensorKind.STATISTIC.value: "float32", TensorKind.INTEGER.value: "int64"}
    return role == CONSTANT or dtype == usual.get(role, dtype)


def _is_old_argument(argument: Argument) -> bool:
    if isinstance(argument, list | tuple):
        return all(map(_is_old_argument, argument))
    if isinstance(argument, dict):
        return argument.get("dtype") not in {"complex64", "complex128"}
    if isinstance(argument, str):
        return (argument.replace("_", "").isalpha() and argument.islower()) or not argument
    return not isinstance(argument, float) or abs(argument) < 2**63
