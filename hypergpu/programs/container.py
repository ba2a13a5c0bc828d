"""A program's container: two graphs of operator calls over named tensors and the fields of a batch,
the backward graphs of a user's own gradients, and a graph of metrics over all held-out samples.

It comes from strangers. There is no code in it, and no text that anything evaluates. What it may
hold is said in `hypergpu.programs.checks`, which sees all of it before torch does.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from hypergpu.tensors.layout import TensorKind

VERSION = 4
RULES_VERSION = 3
"""The first that holds gradients of the user's own, and most operators."""
OLDEST_VERSION = 2
"""Programs of this version and later run here as they did where they were made."""
PROGRAM_PATH = "program/program.json"
TENSORS_PATH = "program/tensors.safetensors"
SIZE_MOST = 64 << 20
"""Bytes of a container; a model of 124M parameters takes about 1 MB."""
FIELDS_MOST = 64
ITEMS_MOST = 4096
"""Elements of a list of arguments, and parts of one result."""
OUTPUTS_MOST = 16
"""Outputs of a batch that metrics over all held-out samples are computed from."""
OUTPUTS_BYTES_MOST = 256 << 20
"""Bytes of these outputs, of all held-out samples together."""
EVALUATE_ALL_BYTES_MOST = 2 << 30
"""Bytes of the results that computing these metrics holds at any moment."""

DTYPES = frozenset(
    {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"}
    | {"bool"}
)
"""Types of stored tensors."""
ARGUMENT_DTYPES = DTYPES | {"complex64", "complex128"}
MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last"})
CONSTANT = "constant"
"""Role of a tensor that is not trained: a frozen parameter, or a table."""
ROLES = frozenset({*(kind.value for kind in TensorKind), CONSTANT})
NO_GRADIENT = -1
"""In place of a value's number, where a backward graph gives an input no gradient."""

Argument = Any
"""A plain value, a list of arguments, or an object with one key: ``value`` (number of an earlier
one), ``dtype``, ``memory_format``, ``number`` (``inf``, ``-inf``, ``nan``) or ``device``.
"""
# As a container is decoded: lists of three levels at most, each of bounded length, so that their
# sizes are known before anything is made of them.
_Object = Annotated[dict[str, int | str | bool], msgspec.Meta(max_length=1)]
_Plain = None | bool | int | float | str
_Inner = Annotated[list[_Plain | _Object], msgspec.Meta(max_length=ITEMS_MOST)]
_Middle = Annotated[list[_Plain | _Object | _Inner], msgspec.Meta(max_length=ITEMS_MOST)]
_Outer = Annotated[list[_Plain | _Object | _Middle], msgspec.Meta(max_length=ITEMS_MOST)]
_Decoded = _Plain | _Object | _Outer


class ProgramError(ValueError):
    """No program that may run. The text says where, what is wrong and what would be right.

    Args:
        text: See above.
        call: Name of the graph and number of the call in it that failed; None: no call did.
    """

    def __init__(self, text: str, call: tuple[str, int] | None = None) -> None:
        super().__init__(text)
        self.call = call


class ProgramBoundError(ProgramError):
    """A program would take more than it may: memory, results, or numbers beyond a limit."""


class ProgramMemoryError(ProgramBoundError):
    """A program's results would take more memory than they may."""


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
    arguments: Annotated[tuple[_Decoded, ...], msgspec.Meta(max_length=ITEMS_MOST)] = ()
    named: Annotated[dict[str, _Decoded], msgspec.Meta(max_length=32)] = {}
    is_graded: bool = True
    """Whether gradients flow through it."""


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls in order. Values are numbered: the graph's inputs, then each result."""

    calls: tuple[OperatorCall, ...]
    outputs: tuple[int, ...]
    """Numbers of the mean loss and, for evaluation, of each metric's mean over the batch and of
    each output of the batch. Of `EvaluateAll`: numbers of the metrics.
    """


class BackwardRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gradient of the user's own. A call of `CUSTOM_GRADIENT` gives the outputs of a function
    whose gradient this graph computes.

    Its inputs are the gradients of the outputs, then captured values. Its outputs are the gradients
    of the function's inputs, or `NO_GRADIENT`.
    """

    gradients: int
    captured: int
    graph: Graph

    @property
    def inputs_count(self) -> int:
        """Number of values before the first result."""
        return self.gradients + self.captured


class EvaluateAll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics over all held-out samples. The graph's inputs are the outputs that the program gives
    of a batch, each of all batches, one after the other, along the first dimension; then constants.
    """

    outputs: tuple[str, ...]
    """Names of the outputs."""
    metrics: tuple[str, ...]
    """Names of the graph's outputs, each a single number."""
    graph: Graph
    constants: tuple[str, ...] = ()
    """Names of tensors of the program that are constants."""

    @property
    def inputs_count(self) -> int:
        """Number of values before the first result."""
        return len(self.outputs) + len(self.constants)


class Program(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A model with its loss. `hypergpu.programs.checks.read_program` gives only what was checked.

    A graph's inputs are the program's tensors, then its fields.
    """

    version: int
    tensors: tuple[ProgramTensor, ...]
    fields: tuple[Field, ...]
    train: Graph
    evaluate: Graph
    metrics: tuple[str, ...] = ()
    """Names of the metrics that are means over samples."""
    evaluation_batch: int = 256
    """Held-out samples that are evaluated at once, in 1 to 65,536."""
    rules: tuple[BackwardRule, ...] = ()
    """Since version 3."""
    evaluate_all: EvaluateAll | None = None
    """Since version 4. Nodes run it never."""

    @property
    def inputs_count(self) -> int:
        """Number of values before the first result."""
        return len(self.tensors) + len(self.fields)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of all metrics, the one that a target is about first; none: the loss is."""
        whole = self.evaluate_all.metrics if self.evaluate_all is not None else ()
        return (*whole, *self.metrics)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs of a batch that evaluation gives besides loss and metrics."""
        return self.evaluate_all.outputs if self.evaluate_all is not None else ()

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All that nodes may run."""
        return (self.train, self.evaluate, *(rule.graph for rule in self.rules))

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that nodes call, each once, in order."""
        return tuple(sorted({call.operator for graph in self.graphs for call in graph.calls}))


def program_bytes(program: Program) -> bytes:
    """The container of a program."""
    return msgspec.json.encode(program)


def value_numbers(argument: Argument) -> Iterator[int]:
    """Numbers of the values that an argument names."""
    if isinstance(argument, dict) and "value" in argument:
        yield argument["value"]
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from value_numbers(each)
