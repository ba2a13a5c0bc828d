"""What a program may hold: names, sizes, operators and arguments, checked without torch."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from hypergpu.programs.container import (
    ARGUMENT_DTYPES,
    CONSTANT,
    DTYPES,
    FIELDS_MOST,
    ITEMS_MOST,
    MEMORY_FORMATS,
    NO_GRADIENT,
    OLDEST_VERSION,
    OUTPUTS_MOST,
    PROGRAM_PATH,
    ROLES,
    SIZE_MOST,
    VERSION,
    Argument,
    BackwardRule,
    EvaluateAll,
    Graph,
    OperatorCall,
    Program,
    ProgramError,
    ProgramTensor,
)
from hypergpu.programs.numbers import INTEGER_MOST
from hypergpu.programs.operators import CUSTOM_GRADIENT, OPERATORS
from hypergpu.tensors.layout import TensorKind

_COMMAS_MOST = 4_000_000
"""Commas of a container, and so its lists, texts and numbers: 300 MB in memory at most. A program
of 200,000 calls has about two million.
"""
_CALLS_MOST = 200_000
_TENSORS_MOST = 100_000
_RULES_MOST = 4096
_DEPTH_MOST = 3
_BATCH_MOST = 65_536
_METRICS_MOST = 16
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_WORD = re.compile(r"[a-z_]{0,32}")
_EQUATION = re.compile(r"[A-Za-z.,> -]{1,256}")
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,31}")
_EINSUM = "aten.einsum.default"
_FLOATS = {"float32", "float64", "float16", "bfloat16"}
_TYPES_OF_ROLES = {
    TensorKind.PARAMETER.value: {"float32"},
    TensorKind.STATISTIC.value: _FLOATS,
    TensorKind.INTEGER.value: DTYPES - _FLOATS,
}


def read_program(folder: Path) -> Program:
    """The program in a job's data folder.

    Raises:
        ProgramError: There is none, or it is not one that may run.
    """
    path = folder / PROGRAM_PATH
    try:
        with path.open("rb") as file:
            content = file.read(SIZE_MOST + 1)
    except OSError as error:
        raise ProgramError(f"{PROGRAM_PATH} cannot be read: {error.strerror}") from error
    return parse_program(content)


def parse_program(content: bytes) -> Program:
    """The program that a container's bytes hold.

    Raises:
        ProgramError: They hold none that may run.
    """
    if len(content) > SIZE_MOST:
        raise ProgramError(f"{PROGRAM_PATH} is larger than {SIZE_MOST >> 20} MB")
    if content.count(b",") > _COMMAS_MOST:
        raise ProgramError(f"{PROGRAM_PATH} has more than {_COMMAS_MOST:,} values")
    try:
        program = msgspec.json.decode(content, type=Program)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ProgramError(f"{PROGRAM_PATH} is no program: {error}") from error
    check_program(program)
    return program


def check_program(program: Program) -> None:
    """Refuse what may not run.

    Raises:
        ProgramError: Names the first fault.
    """
    if not OLDEST_VERSION <= program.version <= VERSION:
        raise ProgramError(
            f"the program has version {program.version}, this node runs {OLDEST_VERSION} to"
            f" {VERSION}: install the same version of hypergpu on both"
        )
    if not 1 <= program.evaluation_batch <= _BATCH_MOST:
        raise ProgramError(f"evaluation_batch must be 1 to {_BATCH_MOST:,}")
    _check_metrics(program.metric_names)
    if len(program.tensors) > _TENSORS_MOST or not 0 < len(program.fields) <= FIELDS_MOST:
        raise ProgramError(f"at most {_TENSORS_MOST:,} tensors and 1 to {FIELDS_MOST} fields")
    _check_names([each.name for each in program.tensors], "tensor")
    _check_names([each.name for each in program.fields], "field")
    for tensor in program.tensors:
        _check_tensor(tensor)
    for field in program.fields:
        _check_shape(f"field {field.name}", field.shape, field.dtype)
    _check_rules(program.rules)
    _check_graph("train", program.train, program, outputs=1)
    outputs = 1 + len(program.metrics) + len(program.output_names)
    _check_graph("evaluate", program.evaluate, program, outputs=outputs)
    if program.evaluate_all is not None:
        _check_evaluate_all(program.evaluate_all, program)


def _check_metrics(names: Sequence[str]) -> None:
    if len(names) > _METRICS_MOST or len(set(names)) != len(names):
        raise ProgramError(f"at most {_METRICS_MOST} metrics, each with a name of its own")
    for name in names:
        if not _METRIC.fullmatch(name) or name == "loss":
            raise ProgramError(
                f"a metric cannot be called {name[:60]!r}: at most 32 small letters, digits and"
                " underscores, a letter first, and not loss"
            )


def _check_names(names: Sequence[str], what: str) -> None:
    for name in names:
        if len(name) > 512 or not _NAME.fullmatch(name):
            raise ProgramError(f"{what} {name[:60]!r}: letters, digits, underscores and dots only")
    if len(set(names)) != len(names):
        raise ProgramError(f"two {what}s have the same name")


def _check_tensor(tensor: ProgramTensor) -> None:
    where = f"tensor {tensor.name}"
    _check_shape(where, tensor.shape, tensor.dtype)
    if tensor.role not in ROLES:
        raise ProgramError(f"{where}: its role must be one of {', '.join(sorted(ROLES))}")
    if tensor.dtype not in _TYPES_OF_ROLES.get(tensor.role, DTYPES):
        raise ProgramError(f"{where}: a {tensor.role} cannot be {tensor.dtype}")


def _check_shape(where: str, shape: Sequence[int], dtype: str) -> None:
    if dtype not in DTYPES:
        raise ProgramError(f"{where}: {dtype[:40]!r} is none of {', '.join(sorted(DTYPES))}")
    if len(shape) > 16 or any(not 0 <= each <= INTEGER_MOST for each in shape):
        raise ProgramError(f"{where}: a shape has at most 16 sizes, none below 0")
    if math.prod(shape) > 1 << 40:
        raise ProgramError(f"{where}: more than {1 << 40:,} elements")


def _check_rules(rules: Sequence[BackwardRule]) -> None:
    if len(rules) > _RULES_MOST:
        raise ProgramError(f"more than {_RULES_MOST:,} gradients of the user's own")
    if sum(len(rule.graph.calls) for rule in rules) > _CALLS_MOST:
        raise ProgramError(f"rules: more than {_CALLS_MOST:,} calls")
    for number, rule in enumerate(rules):
        name, counts = f"rule {number}", (rule.gradients, rule.captured, len(rule.graph.outputs))
        if not (rule.gradients >= 1 and all(0 <= count <= ITEMS_MOST for count in counts)):
            raise ProgramError(f"{name}: at most {ITEMS_MOST:,} gradients and captured values")
        _check_calls(name, rule.graph.calls, rule.inputs_count, ())
        count = rule.inputs_count + len(rule.graph.calls)
        if any(not NO_GRADIENT <= each < count for each in rule.graph.outputs):
            raise ProgramError(f"{name}: its outputs must be values of its own")


def _check_evaluate_all(whole: EvaluateAll, program: Program) -> None:
    if program.version < VERSION:
        raise ProgramError(f"evaluate_all: a program of version {program.version} has none")
    if not {*whole.constants} <= {each.name for each in program.tensors if each.role == CONSTANT}:
        raise ProgramError("evaluate_all: its constants must be constants of the program")
    if not 1 <= len(whole.outputs) <= OUTPUTS_MOST or not whole.metrics:
        raise ProgramError(f"evaluate_all: 1 to {OUTPUTS_MOST} outputs, and at least one metric")
    _check_names(whole.outputs, "output")
    _check_calls("evaluate_all", whole.graph.calls, whole.inputs_count, ())
    count = whole.inputs_count + len(whole.graph.calls)
    outputs = whole.graph.outputs
    if len(outputs) != len(whole.metrics) or any(not 0 <= each < count for each in outputs):
        raise ProgramError("evaluate_all: its outputs must be values of its own, one a metric")


def _check_graph(name: str, graph: Graph, program: Program, *, outputs: int) -> None:
    _check_calls(name, graph.calls, program.inputs_count, program.rules)
    count = program.inputs_count + len(graph.calls)
    if len(graph.outputs) != outputs or any(not 0 <= each < count for each in graph.outputs):
        raise ProgramError(f"{name}: {outputs} of the values must be its outputs")


def _check_calls(
    name: str, calls: Sequence[OperatorCall], inputs_count: int, rules: Sequence[BackwardRule]
) -> None:
    """Check a graph's calls. Those of a rule have no rules of their own."""
    if len(calls) > _CALLS_MOST:
        raise ProgramError(f"{name}: more than {_CALLS_MOST:,} calls")
    for number, call in enumerate(calls):
        where = f"{name}, call {number} ({call.operator[:60]})"
        _check_call(where, call, inputs_count + number)
        if call.operator == CUSTOM_GRADIENT:
            _check_custom_gradient(where, call, rules)


def _check_call(where: str, call: OperatorCall, earlier: int) -> None:
    if call.operator not in OPERATORS:
        raise ProgramError(f"{where}: this operator is not allowed in a program")
    if len(call.arguments) > ITEMS_MOST or len(call.named) > 32:
        raise ProgramError(f"{where}: too many arguments")
    for key in call.named:
        if not _NAME.fullmatch(key) or len(key) > 64 or "." in key:
            raise ProgramError(f"{where}: {key[:60]!r} is no name of an argument")
    arguments = call.arguments
    if call.operator == _EINSUM and arguments and isinstance(arguments[0], str):
        if not _EQUATION.fullmatch(arguments[0]):
            raise ProgramError(f"{where}: {arguments[0][:60]!r} is no equation")
        arguments = arguments[1:]
    for argument in (*arguments, *call.named.values()):
        _check_argument(where, argument, earlier)


def _check_custom_gradient(where: str, call: OperatorCall, rules: Sequence[BackwardRule]) -> None:
    """Its arguments: number of the rule, inputs, outputs and captured values."""
    if len(call.arguments) != 4 or call.named:
        raise ProgramError(f"{where}: it takes a rule, inputs, outputs and captured values")
    number, *lists = call.arguments
    if type(number) is not int or not 0 <= number < len(rules):
        raise ProgramError(f"{where}: there is no such rule")
    rule = rules[number]
    counts = (len(rule.graph.outputs), rule.gradients, rule.captured)
    for each, count in zip(lists, counts, strict=True):
        values = each if isinstance(each, list | tuple) else []
        if len(values) != count or not all(isinstance(one, dict) for one in values):
            raise ProgramError(f"{where}: its values are not as many as rule {number} takes")


def _check_argument(where: str, argument: Argument, earlier: int, depth: int = 0) -> None:
    if isinstance(argument, int | float | str):
        _check_plain(where, argument)
    elif isinstance(argument, list | tuple):
        if depth >= _DEPTH_MOST or len(argument) > ITEMS_MOST:
            raise ProgramError(f"{where}: a list is too long or too deep")
        for each in argument:
            _check_argument(where, each, earlier, depth + 1)
    elif argument is not None:
        _check_object(where, argument, earlier)


def _check_plain(where: str, argument: float | str) -> None:
    if isinstance(argument, str):
        if not _WORD.fullmatch(argument):
            raise ProgramError(f"{where}: a text must be one short word")
    elif isinstance(argument, int) and not -INTEGER_MOST - 1 <= argument <= INTEGER_MOST:
        raise ProgramError(f"{where}: a whole number is beyond 64 bits")


def _check_object(where: str, argument: Argument, earlier: int) -> None:
    def refuse(what: str) -> NoReturn:
        raise ProgramError(f"{where}: {what}")

    if not isinstance(argument, dict) or len(argument) != 1:
        refuse("an argument is neither a value nor an object with one key")
    ((key, value),) = argument.items()
    key_checks: dict[str, bool] = {
        "value": type(value) is int and 0 <= value < earlier,
        "dtype": isinstance(value, str) and value in ARGUMENT_DTYPES,
        "memory_format": isinstance(value, str) and value in MEMORY_FORMATS,
        "number": isinstance(value, str) and value in {"inf", "-inf", "nan"},
        "device": value is True,
    }
    if key not in key_checks:
        refuse(f"{key[:40]!r} is none of {', '.join(key_checks)}")
    if not key_checks[key]:
        refuse(f"{key} cannot be {str(value)[:40]!r}" + (", no earlier value" * (key == "value")))
