"""Which inputs of a graph its calls change in place, directly or by a view."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypergpu.programs.operators import ATEN, CUSTOM_GRADIENT
from hypergpu.workloads.networks.graph_calls import PendingCall, Value, values_of
from hypergpu.workloads.networks.graph_runner import function_of

_STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")
"""They change their arguments 3 and 4 in training, and their schemas do not say so."""


def written_inputs(
    calls: Sequence[PendingCall], inputs: Iterable[Value]
) -> Mapping[Value, PendingCall]:
    """Inputs that calls change, each with the first call that does."""
    bases: dict[Value, set[Value]] = {value: {value} for value in inputs}
    writes: dict[Value, PendingCall] = {}
    for call in calls:
        written_arguments, shared_arguments = _arguments_by_use(call)
        for value in values_of(written_arguments):
            for base in bases.get(value, ()):
                writes.setdefault(base, call)
        bases[call.result] = {
            base for value in values_of(shared_arguments) for base in bases.get(value, ())
        }
    return writes


def _arguments_by_use(call: PendingCall) -> tuple[list[Any], list[Any]]:
    """Arguments that a call changes, and those that its result shares memory with."""
    if call.operator == "operator.getitem":
        return [], [call.arguments[0]]
    if call.operator == CUSTOM_GRADIENT:
        return [], [call.arguments[2]]
    if call.operator not in ATEN:
        return [], []
    if call.operator in _STATISTICS:
        return [*call.arguments[3:5]] if call.arguments[5] else [], []
    schema = function_of(call.operator)._schema  # type: ignore[attr-defined]  # noqa: SLF001
    written_arguments, shared_arguments = [], []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        positional = call.arguments[number] if number < len(call.arguments) else None
        operand = call.named.get(argument.name, positional)
        shared_arguments.append(operand)
        if argument.alias_info.is_write:
            written_arguments.append(operand)
    return written_arguments, shared_arguments
