"""A module of the user's own as a program that only runs forward, for `hypergpu.map`.

It is traced like a model that is trained, with the mean of its output for a loss; nodes run its
graph of evaluation and take the output.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from hypergpu.programs.checks import parse_program
from hypergpu.programs.container import Field, ProgramError, program_bytes
from hypergpu.programs.samples import stored_array
from hypergpu.workloads.networks.program import ready_graphs
from hypergpu.workloads.networks.tracing import BatchShape, TracedProgram, trace
from hypergpu.workloads.networks.whole_set_tracing import trace_whole_set

OUTPUT = "output"
_EXAMPLES = 3
_COMPARED_MOST = 16
_RELATIVE_ERROR = 1e-3
_EXAMPLE_BYTES_MOST = 64 << 20


class ForwardProgram(NamedTuple):
    """What nodes get in place of a module."""

    program: bytes
    tensors: bytes
    """Safetensors."""
    output_shape: tuple[int, ...]
    """Shape of one item's output."""


class _Evaluated(nn.Module):
    """A module that is always in evaluation mode."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def train(self, mode: bool = True) -> "_Evaluated":  # noqa: FBT001, FBT002 - torch's signature
        super().train(mode)
        self.module.eval()
        return self

    def forward(self, *fields: Tensor) -> Tensor:
        output = self.module(*fields)
        if not isinstance(output, Tensor) or output.dim() == 0:
            raise ProgramError(
                f"the module gives {type(output).__name__}, and has to give one tensor whose first"
                " dimension is the items. Fix: wrap it in a module that returns that tensor"
            )
        return output


def forward_program(
    module: nn.Module, fields: Mapping[str, NDArray[Any]], *, batch_size: int = 64
) -> ForwardProgram:
    """Trace a module and compare the program with it on the first items.

    Args:
        module: Takes the fields in order and gives one tensor. It is left as it was.
        fields: Items by field, at least one.
        batch_size: Items that nodes run at once.

    Raises:
        ProgramError: It cannot be traced, or its program computes otherwise.
    """
    arrays = {name: stored_array("data", name, array) for name, array in fields.items()}
    forms = [Field(name, array.shape[1:], str(array.dtype)) for name, array in arrays.items()]
    examples = [torch.from_numpy(np.array(array[:_COMPARED_MOST])) for array in arrays.values()]
    modes = {name: each.training for name, each in module.named_modules()}
    try:
        traced_program = _trace_forward(_Evaluated(module), forms, examples)
        with torch.inference_mode():
            module_output = module.eval()(*_on_device_of(module, examples)).float().cpu()
    finally:
        for name, each in module.named_modules():
            each.training = modes[name]
    size = _batch_size(batch_size, traced_program.program.fields)
    content = program_bytes(replace(traced_program.program, evaluation_batch=size))
    _check(content, traced_program, examples, module_output)
    return ForwardProgram(content, save(traced_program.tensors), tuple(module_output.shape[1:]))


def _batch_size(wanted: int, fields: tuple[Field, ...]) -> int:
    """Items at once, fewer where a single one is large."""
    item_bytes = sum(
        int(np.prod(field.shape, dtype=np.int64)) * np.dtype(field.dtype).itemsize
        for field in fields
    )
    return max(1, min(wanted, 65_536, _EXAMPLE_BYTES_MOST // max(1, item_bytes)))


def _on_device_of(module: nn.Module, examples: list[Tensor]) -> list[Tensor]:
    first = next(module.parameters(), None)
    return examples if first is None else [each.to(first.device) for each in examples]


def _trace_forward(module: _Evaluated, forms: list[Field], examples: list[Tensor]) -> TracedProgram:
    shape = BatchShape(tuple(each.name for each in forms), is_tuple=True)

    def loss(model: nn.Module, batch: Any) -> Any:
        output = model(*batch)
        return output.float().mean(), {}, {OUTPUT: output}

    def evaluate_all(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"mean_output": outputs[OUTPUT].float().mean()}

    with torch.no_grad():
        output = module.eval()(*_on_device_of(module, [each[:1] for each in examples]))
    several = {OUTPUT: torch.cat([output.detach().cpu()] * _EXAMPLES)}
    return trace(module, loss, shape, forms, _EXAMPLES, trace_whole_set(evaluate_all, several))


def _check(
    content: bytes, traced_program: TracedProgram, examples: list[Tensor], module_output: Tensor
) -> None:
    """Compare the program with its module.

    Raises:
        ProgramError: They differ.
    """
    program = parse_program(content)
    tensors = [traced_program.tensors[each.name] for each in program.tensors]
    with torch.inference_mode():
        values = ready_graphs(program)[False].run([*tensors, *examples], torch.device("cpu"))
    output = values[-1].float()
    if output.shape != module_output.shape:
        raise ProgramError(
            f"the program gives {list(output.shape)} and the module {list(module_output.shape)} of"
            f" {len(examples[0])} items: its output depends on how many items there are"
        )
    scale = float(module_output.abs().nan_to_num().max()) or 1.0
    error = float((output - module_output).nan_to_num().abs().max()) / scale
    if error > _RELATIVE_ERROR:
        raise ProgramError(
            f"the program's output differs from the module's by {error:.1g} of its largest value."
            " Fix: look for random numbers in its forward pass"
        )
