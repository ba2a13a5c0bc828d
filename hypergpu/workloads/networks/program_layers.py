"""Which of a program's tensors are hidden weights: told from the calls, as no modules are left."""

from collections.abc import Iterator

from hypergpu.optimizer import before_last
from hypergpu.programs.container import OperatorCall, Program, value_numbers
from hypergpu.tensors.layout import TensorKind

_PRODUCTS = frozenset(
    {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "convolution"}
    | {"conv1d", "conv2d", "conv3d"}
)
_SAME_WEIGHTS = frozenset(
    {"t", "transpose", "permute", "view", "reshape", "_unsafe_view", "expand", "unsqueeze"}
    | {"squeeze", "contiguous", "clone", "alias", "detach", "_to_copy", "to", "numpy_T"}
)
"""Calls whose result holds the values of its first argument."""
_EMBEDDING = "embedding"


def program_hidden_weights(program: Program) -> frozenset[str]:
    """Names of trained tensors that a training step multiplies activations by, but the last."""
    return before_last(_layers(program))


def _layers(program: Program) -> Iterator[str | None]:
    """The weight of each layer in the order of its first call; None: it is no hidden one."""
    weights = {
        number: tensor.name
        for number, tensor in enumerate(program.tensors)
        if tensor.role == TensorKind.PARAMETER.value and len(tensor.shape) >= 2
    }
    sources = {number: number for number in weights}
    earlier_nodes: set[int] = set()
    for number, call in enumerate(program.train.calls, start=program.inputs_count):
        kind = _kind_of(call)
        numbers = [*value_numbers(call.arguments)]
        if kind in _SAME_WEIGHTS and numbers and numbers[0] in sources:
            sources[number] = sources[numbers[0]]
        if kind not in _PRODUCTS and kind != _EMBEDDING:
            continue
        for source in (sources[each] for each in numbers if each in sources):
            is_hidden = kind in _PRODUCTS and source not in earlier_nodes
            earlier_nodes.add(source)
            yield weights[source] if is_hidden else None


def _kind_of(call: OperatorCall) -> str:
    """An operator's name without its family and its overload: ``aten.linear.default``."""
    return call.operator.split(".")[1] if "." in call.operator else call.operator
