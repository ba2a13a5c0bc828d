"""Traces a user's `evaluate_all`, and compares what that gives with the function itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.proxy import TracerBase

from hypergpu.programs.container import DTYPES, EvaluateAll, Graph, ProgramError
from hypergpu.workloads.networks.graph_calls import (
    CallList,
    PendingCall,
    Value,
    dtype_name,
    without_dead,
)
from hypergpu.workloads.networks.graph_numbering import number_calls
from hypergpu.workloads.networks.patching import replace_attribute
from hypergpu.workloads.networks.rewriting import rewriting, silent_torch
from hypergpu.workloads.networks.source_lines import CodeLine, raised_line, short
from hypergpu.workloads.networks.trace_errors import GuardLines, explain_failure, is_about_size
from hypergpu.workloads.networks.value_writes import written_inputs

EvaluateAllFunction = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""``evaluate_all(outputs)``: metrics of all held-out samples, of their outputs by name."""
WHOLE_SET_GRAPH = "evaluate_all"
_SAMPLES_MOST = 1 << 40
_RETURN_FIX = 'Fix: return {"f1": value}, with a tensor of one number for each metric'


class TracedWholeSet(NamedTuple):
    """Metrics over all samples as a program holds them."""

    evaluate_all: EvaluateAll
    constants: dict[str, Tensor]
    """Tensors that the user's function holds, by names of the program's own."""
    lines: dict[tuple[str, int], CodeLine]
    """Where the user's code makes a call, by graph and number."""


def run_whole_set(
    function: EvaluateAllFunction, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What the user's function gives of outputs.

    Args:
        function: The user's.
        outputs: By name, with the samples as first dimension.

    Raises:
        ProgramError: It fails, or gives no metrics. The text says where and what to do.
    """
    try:
        with torch.no_grad():
            copies = {name: each.clone() for name, each in outputs.items()}
            return _checked_metrics(function(copies))
    except ProgramError:
        raise
    except Exception as error:  # it is the user's code
        line = raised_line(error)
        place = f" ({line})" if line else ""
        outputs_text = ", ".join(
            f"{name} {dtype_name(each.dtype)}{list(each.shape)}" for name, each in outputs.items()
        )
        error_text = short(str(error)) or "no reason told"
        raise ProgramError(
            f"evaluate_all itself fails{place}: {type(error).__name__}: {error_text}."
            f" Fix: make it run on outputs of {outputs_text}"
        ) from error


def trace_whole_set(function: EvaluateAllFunction, outputs: Mapping[str, Tensor]) -> TracedWholeSet:
    """Trace the metrics of all samples.

    Args:
        function: The user's.
        outputs: Of at least two samples; only shapes and types count. The graph takes any number.

    Raises:
        ProgramError: It cannot be traced, or calls what no program may.
    """
    named_outputs = _NamedOutputs(function, tuple(outputs))
    exported_program = _export(
        named_outputs, tuple(torch.zeros_like(each) for each in outputs.values())
    )
    tensors = {
        **dict(exported_program.named_parameters()),
        **dict(exported_program.named_buffers()),
    }
    tensors |= exported_program.constants
    values = {name: Value() for name in outputs}
    constants: dict[str, Tensor] = {}
    placed_values: dict[Any, Any] = {}
    nodes = {node.name: node for node in exported_program.graph.nodes if node.op == "placeholder"}
    own = iter(outputs)
    for spec in exported_program.graph_signature.input_specs:
        node = nodes[str(spec.arg.name)]
        if spec.target is None:
            placed_values[node] = values[next(own)]
            continue
        name = f"constants_{WHOLE_SET_GRAPH}.{spec.target.replace('.', '_')}"
        constants[name] = _constant_values(tensors[spec.target], name)
        placed_values[node] = values[name] = Value()
    return _number_graph(
        exported_program.graph_module, placed_values, values, constants, named_outputs.metrics
    )


def _export(named: "_NamedOutputs", examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """The function as torch traces it.

    Raises:
        ProgramError: It cannot.
    """
    traced_function = _TracedFunction(named)
    samples = torch.export.Dim("samples", min=1, max=_SAMPLES_MOST)
    dynamic = (tuple({0: samples} for _ in examples),)
    guards = GuardLines()
    try:
        with silent_torch(), guards.recording(), _noting_lines(), torch.no_grad():
            return torch.export.export(
                traced_function, examples, dynamic_shapes=dynamic, strict=False
            )
    except Exception as error:  # torch.export raises anything that the function raises
        if is_about_size(error, "samples"):
            line = guards.decisive()
            place = f" ({line})" if line else ""
            raise ProgramError(
                f"evaluate_all fixes the number of samples{place}."
                " Fix: compute over all of them, with x.shape[0] for their number"
            ) from error
        raise explain_failure(error, subject=WHOLE_SET_GRAPH) from error


def _number_graph(
    module: Any,
    placed: dict[Any, Any],
    values: Mapping[str, Value],
    constants: dict[str, Tensor],
    metrics: tuple[str, ...],
) -> TracedWholeSet:
    call_list = CallList(placed)
    results = call_list.add_graph(module)
    calls = [each for each in call_list.items if isinstance(each, PendingCall)]
    if len(calls) != len(call_list.items):
        raise ProgramError("evaluate_all computes a gradient of its own. Fix: leave it out")
    calls = without_dead(calls, results)
    ordered_values = [value for name, value in values.items() if name not in constants]
    ordered_values += [values[name] for name in constants]
    writes = written_inputs(calls, ordered_values)
    input_write = next((writes[value] for value in ordered_values if value in writes), None)
    if input_write is not None:
        raise ProgramError(
            f"evaluate_all changes what it is given in place{input_write.place()}."
            " Fix: change a copy, x.clone()"
        )
    numbers = {value: number for number, value in enumerate(ordered_values)}
    numbered_calls = number_calls(calls, numbers, WHOLE_SET_GRAPH)
    lines = {(WHOLE_SET_GRAPH, number): call.line for number, call in enumerate(calls) if call.line}
    for name, result in zip(metrics, results, strict=True):
        if not isinstance(result, Value):
            raise ProgramError(
                f"evaluate_all: its metric {name} depends on no output. Fix: compute it of outputs"
            )
    graph = Graph(numbered_calls, tuple(numbers[each] for each in results))
    names = tuple(name for name in values if name not in constants)
    return TracedWholeSet(EvaluateAll(names, metrics, graph, tuple(constants)), constants, lines)


def _constant_values(tensor: Tensor, name: str) -> Tensor:
    if dtype_name(tensor.dtype) not in DTYPES:
        raise ProgramError(
            f"evaluate_all holds a tensor of {dtype_name(tensor.dtype)} ({name})."
            f" Fix: make it one of {', '.join(sorted(DTYPES))}"
        )
    return tensor.detach().cpu().clone().contiguous()


def _all_frames(_tracer: Any, frames: StackSummary) -> StackSummary:
    return frames


@contextmanager
def _noting_lines() -> Iterator[None]:
    """Let torch note the whole stack of each call, and not that of a module's forward alone."""
    with replace_attribute(TracerBase, "_filter_traceback_frames", _all_frames):
        yield


class _NamedOutputs:
    """The user's function over outputs in their order. torch restores what tracing changes in a
    module, but not here.
    """

    def __init__(self, function: EvaluateAllFunction, names: Sequence[str]) -> None:
        self._function = function
        self._names = names
        self.metrics: tuple[str, ...] = ()

    def __call__(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        metrics = _checked_metrics(self._function(dict(zip(self._names, outputs, strict=True))))
        self.metrics = tuple(metrics)
        return tuple(metrics.values())


class _TracedFunction(nn.Module):
    """That as a module."""

    def __init__(self, named: _NamedOutputs) -> None:
        super().__init__()
        self._named = named

    def forward(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        with rewriting():
            return self._named(outputs)


def _checked_metrics(made: Any) -> dict[str, Tensor]:
    """Metrics by name.

    Raises:
        ProgramError: They are none.
    """
    if not isinstance(made, Mapping) or not made:
        kind = "an empty dictionary" if isinstance(made, Mapping) else f"a {type(made).__name__}"
        raise ProgramError(f"evaluate_all gives {kind}, and no metrics by name. {_RETURN_FIX}")
    for name, value in made.items():
        if not isinstance(name, str):
            raise ProgramError(f"evaluate_all names a metric {name!r}. {_RETURN_FIX}")
        if not isinstance(value, Tensor):
            raise ProgramError(
                f"evaluate_all gives {name} as a {type(value).__name__}, and no tensor."
                f" {_RETURN_FIX}, without item() or float()"
            )
        if value.numel() != 1 or value.is_complex():
            raise ProgramError(
                f"evaluate_all gives {name} with shape {list(value.shape)}, and a metric is one"
                f" number. {_RETURN_FIX}"
            )
    return {name: value.detach() for name, value in made.items()}
