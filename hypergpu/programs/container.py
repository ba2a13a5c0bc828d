"""A program's container: two graphs of operator calls over named tensors and the fields of a batch.

It comes from strangers. Everything in it is checked here, before torch sees any of it: there is no
code in it, and no text that anything evaluates.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from hypergpu.programs.operators import OPERATORS
from hypergpu.tensors.layout import TensorKind

VERSION = 2
PROGRAM_PATH = "program/program.json"
TENSORS_PATH = "program/tensors.safetensors"
SIZE_MOST = 64 << 20
"""Bytes of a container; a model of 124M parameters takes about 1 MB."""
FIELDS_MOST = 64
_CALLS_MOST = 200_000
_TENSORS_MOST = 100_000
_ITEMS_MOST = 4096
_DEPTH_MOST = 3
_INTEGER_MOST = 2**63 - 1
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_WORD = re.compile(r"[a-z_]{0,32}")
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,31}")
_METRICS_MOST = 16

DTYPES = frozenset(
    {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"}
    | {"bool"}
)
MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last"})
CONSTANT = "constant"
"""Role of a tensor that is not trained: a frozen parameter, or a table."""
ROLES = frozenset({*(kind.value for kind in TensorKind), CONSTANT})

Argument = Any
"""A plain value, a list of arguments, or an object with one key: ``value`` (number of an earlier
one), ``dtype``, ``memory_format``, ``number`` (``inf``, ``-inf``, ``nan``) or ``device``.
"""


_BATCH_MOST = 65_536


class ProgramError(ValueError):
    """No program that may run. The text says where, what is wrong and what would be right."""


class ProgramTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that a program computes with. Its first values are beside the container."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    """One of `ROLES`."""


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input of every sample."""

    name: str
    shape: tuple[int, ...]
    """The shape of one sample."""
    dtype: str


class OperatorCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call of an operator. Its result is the next value."""

    operator: str
    arguments: tuple[Argument, ...] = ()
    named: dict[str, Argument] = {}
    is_graded: bool = True
    """Whether gradients flow through it."""


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls in order. Values are numbered: the program's tensors, its fields, then each result."""

    calls: tuple[OperatorCall, ...]
    outputs: tuple[int, ...]
    """Numbers of the mean loss and, for evaluation, of each metric's mean over the batch."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model with its loss. `read_program` gives only what was checked."""

    version: int = VERSION
    tensors: tuple[ProgramTensor, ...]
    fields: tuple[Field, ...]
    train: Graph
    evaluate: Graph
    metrics: tuple[str, ...] = ()
    """Names of the metrics, the one that a target is about first; none: the loss is."""
    evaluation_batch: int = 256
    """Held-out samples that are evaluated at once, in 1 to 65,536."""

    @property
    def inputs_count(self) -> int:
        """Number of values before the first result."""
        return len(self.tensors) + len(self.fields)

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that are called, each once, in order."""
        calls = (*self.train.calls, *self.evaluate.calls)
        return tuple(sorted({call.operator for call in calls}))


def read_program(folder: Path) -> Program:
    """The program in a job's data folder.

    Raises:
        ProgramError: There is none, or it is not one that may run.
    """
    path = folder / PROGRAM_PATH
    try:
        with path.open("rb") as file:
            content = file.read(SIZE_MOST + 1)
    except OSError as broken:
        raise ProgramError(f"{PROGRAM_PATH} cannot be read: {broken.strerror}") from broken
    return parse_program(content)


def parse_program(content: bytes) -> Program:
    """The program that a container's bytes hold.

    Raises:
        ProgramError: They hold none that may run.
    """
    if len(content) > SIZE_MOST:
        raise ProgramError(f"{PROGRAM_PATH} is larger than {SIZE_MOST >> 20} MB")
    try:
        program = msgspec.json.decode(content, type=Program)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as broken:
        raise ProgramError(f"{PROGRAM_PATH} is no program: {broken}") from broken
    check_program(program)
    return program


def program_bytes(program: Program) -> bytes:
    """The container of a program."""
    return msgspec.json.encode(program)


def check_program(program: Program) -> None:
    """Refuse what may not run.

    Raises:
        ProgramError: Names the first fault.
    """
    if program.version != VERSION:
        raise ProgramError(
            f"the program has version {program.version}, this node runs {VERSION}:"
            " install the same version of hypergpu on both"
        )
    if not 1 <= program.evaluation_batch <= _BATCH_MOST:
        raise ProgramError(f"evaluation_batch must be 1 to {_BATCH_MOST:,}")
    _check_metrics(program.metrics)
    if len(program.tensors) > _TENSORS_MOST or not 0 < len(program.fields) <= FIELDS_MOST:
        raise ProgramError(f"at most {_TENSORS_MOST:,} tensors and 1 to {FIELDS_MOST} fields")
    _check_names([each.name for each in program.tensors], "tensor")
    _check_names([each.name for each in program.fields], "field")
    for tensor in program.tensors:
        _check_tensor(tensor)
    for field in program.fields:
        _check_shape(f"field {field.name}", field.shape, field.dtype)
    _check_graph("train", program.train, program, outputs=1)
    _check_graph("evaluate", program.evaluate, program, outputs=1 + len(program.metrics))


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
    wanted = {
        TensorKind.PARAMETER.value: tensor.dtype == "float32",
        TensorKind.STATISTIC.value: tensor.dtype == "float32",
        TensorKind.INTEGER.value: tensor.dtype == "int64",
    }
    if not wanted.get(tensor.role, True):
        raise ProgramError(f"{where}: a {tensor.role} cannot be {tensor.dtype}")


def _check_shape(where: str, shape: Sequence[int], dtype: str) -> None:
    if dtype not in DTYPES:
        raise ProgramError(f"{where}: {dtype[:40]!r} is none of {', '.join(sorted(DTYPES))}")
    if len(shape) > 16 or any(not 0 <= each <= _INTEGER_MOST for each in shape):
        raise ProgramError(f"{where}: a shape has at most 16 sizes, none below 0")
    if math.prod(shape) > 1 << 40:
        raise ProgramError(f"{where}: more than {1 << 40:,} elements")


def _check_graph(name: str, graph: Graph, program: Program, *, outputs: int) -> None:
    if len(graph.calls) > _CALLS_MOST:
        raise ProgramError(f"{name}: more than {_CALLS_MOST:,} calls")
    for number, call in enumerate(graph.calls):
        where = f"{name}, call {number} ({call.operator[:60]})"
        _check_call(where, call, program.inputs_count + number)
    count = program.inputs_count + len(graph.calls)
    if len(graph.outputs) != outputs or any(not 0 <= each < count for each in graph.outputs):
        raise ProgramError(f"{name}: {outputs} of the values must be its outputs")


def _check_call(where: str, call: OperatorCall, known: int) -> None:
    if call.operator not in OPERATORS:
        raise ProgramError(f"{where}: this operator is not allowed in a program")
    if len(call.arguments) > _ITEMS_MOST or len(call.named) > 32:
        raise ProgramError(f"{where}: too many arguments")
    for key in call.named:
        if not _NAME.fullmatch(key) or len(key) > 64 or "." in key:
            raise ProgramError(f"{where}: {key[:60]!r} is no name of an argument")
    for argument in (*call.arguments, *call.named.values()):
        _check_argument(where, argument, known)


def _check_argument(where: str, argument: Argument, known: int, depth: int = 0) -> None:
    if isinstance(argument, int | float | str):
        _check_plain(where, argument)
    elif isinstance(argument, list):
        if depth >= _DEPTH_MOST or len(argument) > _ITEMS_MOST:
            raise ProgramError(f"{where}: a list is too long or too deep")
        for each in argument:
            _check_argument(where, each, known, depth + 1)
    elif argument is not None:
        _check_object(where, argument, known)


def _check_plain(where: str, argument: float | str) -> None:
    if isinstance(argument, str):
        if not _WORD.fullmatch(argument):
            raise ProgramError(f"{where}: a text must be one short word")
    elif not abs(argument) <= _INTEGER_MOST + 1:
        raise ProgramError(f"{where}: a number is beyond 64 bits")


def _check_object(where: str, argument: Argument, known: int) -> None:
    def refuse(what: str) -> NoReturn:
        raise ProgramError(f"{where}: {what}")

    if not isinstance(argument, dict) or len(argument) != 1:
        refuse("an argument is neither a value nor an object with one key")
    ((key, value),) = argument.items()
    allowed: dict[str, bool] = {
        "value": type(value) is int and 0 <= value < known,
        "dtype": isinstance(value, str) and value in DTYPES,
        "memory_format": isinstance(value, str) and value in MEMORY_FORMATS,
        "number": isinstance(value, str) and value in {"inf", "-inf", "nan"},
        "device": value is True,
    }
    if key not in allowed:
        refuse(f"{key[:40]!r} is none of {', '.join(allowed)}")
    if not allowed[key]:
        refuse(f"{key} cannot be {str(value)[:40]!r}" + (", no earlier value" * (key == "value")))


def value_numbers(argument: Argument) -> Iterator[int]:
    """Numbers of the values that an argument names."""
    if isinstance(argument, dict) and "value" in argument:
        yield argument["value"]
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from value_numbers(each)
