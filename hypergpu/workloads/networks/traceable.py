"""What a model must be like before it is traced: whole, on one device, and trained by its own
tensors.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hypergpu.programs.container import ProgramError
from hypergpu.programs.ties import tie_of
from hypergpu.workloads.networks.source_lines import definition_line

_TRAINED_DTYPES = (torch.float32, torch.complex64)


def check_model(model: nn.Module) -> None:
    """Refuse a model that no program can be.

    Raises:
        ProgramError: It says why, and what to change.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    _check_values(model, tensors)
    devices = sorted({str(each.device) for each in tensors.values()})
    if len(devices) > 1:
        raise ProgramError(f"the model lies on {' and '.join(devices)}. Fix: model.cpu()")
    _check_trained(model)
    _check_hooks(model)
    check_memory(model, {})


def _check_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ProgramError(
                f"{name}{tensor_place(model, name)} is lazy and has no shape yet."
                " Fix: call the model once with a batch"
            )
        if tensor.device.type == "meta":
            place = tensor_place(model, name)
            raise ProgramError(
                f"{name}{place} is on the device meta and has no values. Fix: load the weights"
            )


def _check_trained(model: nn.Module) -> None:
    trained_parameters = {
        name: each for name, each in model.named_parameters() if each.requires_grad
    }
    if not trained_parameters:
        raise ProgramError(
            "the model has no parameter that requires a gradient."
            " Fix: model.requires_grad_(True), or of the part that shall be trained"
        )
    for name, tensor in trained_parameters.items():
        if tensor.dtype == torch.complex128:
            raise ProgramError(
                f"{name}{tensor_place(model, name)} is complex128, and training has complex64."
                " Fix: make it with dtype=torch.complex64"
            )
        if tensor.dtype not in _TRAINED_DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            place = tensor_place(model, name)
            raise ProgramError(
                f"{name}{place} is {dtype}, and training has float32. Fix: model.float()"
            )


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:  # noqa: SLF001
            raise ProgramError(
                f"{name} has a hook that runs after its gradient was accumulated, and nodes run"
                " none. Fix: register_hook, which gets the gradient and returns another"
            )
    for name, each in model.named_modules():
        if each._backward_hooks and not each._is_full_backward_hook:  # noqa: SLF001
            raise ProgramError(
                f"{name or 'the model'} ({type(each).__name__}) has a hook of"
                " register_backward_hook, which sees a part of its gradients."
                " Fix: register_full_backward_hook"
            )
    hooks = torch.nn.modules.module
    if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:  # noqa: SLF001
        raise ProgramError(
            "a backward hook for all modules is registered. Fix: register_full_backward_hook of"
            " the modules that it is about"
        )


def parameter_hooks(model: nn.Module) -> dict[str, list[Callable[..., object]]]:
    """Hooks of parameters that change their gradients, by name."""
    return {
        name: list((parameter._backward_hooks or {}).values())  # noqa: SLF001 - no public name
        for name, parameter in model.named_parameters()
    }


def check_memory(model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Refuse tensors that share some of their memory, unless they are one and the same parameter.

    Args:
        model: The module.
        constants: Further tensors that its program has, by name.

    Raises:
        ProgramError: A step of one would change the other, but not on nodes.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*_all_tensors(model), *constants.items()):
        if tensor.numel() and tensor.layout is torch.strided:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for group in by_storage.values():
        for (name, one), (other_name, other) in itertools.combinations(group, 2):
            if not (one.requires_grad or other.requires_grad) or one is other:
                continue
            is_tied = one.requires_grad and other.requires_grad and tie_of(one) == tie_of(other)
            if not is_tied and _overlap(one, other):
                raise ProgramError(
                    f"{other_name}{tensor_place(model, other_name)} shares memory with {name}, and"
                    " on nodes the two would part."
                    f" Fix: compute it from {name} in forward"
                )


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of the one is an element of the other; both lie in the same storage."""
    if one.dtype != other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    _elements(marks, one).fill_(True)
    return bool(_elements(marks, other).any())


def _elements(marks: Tensor, tensor: Tensor) -> Tensor:
    return marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class ChangedAttribute(NamedTuple):
    """An attribute of a module that a forward pass sets."""

    kind: type
    name: str

    def __str__(self) -> str:
        line = definition_line(self.kind, [self.name])
        return f"{self.kind.__name__}.{self.name}" + (f" ({line})" if line else "")


def changed_attributes(
    before: Sequence["AttributeState"], model: nn.Module
) -> list[ChangedAttribute]:
    """Attributes that are others than before."""
    return [
        ChangedAttribute(type(module), name)
        for state, module in zip(before, model.modules(), strict=False)
        for name, value in vars(module).items()
        if not name.startswith("_") and _differs(state.values.get(name), value)
    ]


def tensor_place(model: nn.Module, name: str) -> str:
    """Where the user's code makes a tensor of a model, in brackets; empty: it is not there."""
    *path, last = name.split(".")
    modules = dict(model.named_modules())
    for depth in range(len(path), -1, -1):
        owner = modules.get(".".join(path[:depth]))
        below = [*path[depth:], last]
        line = (
            definition_line(type(owner), [".".join(below), below[0]]) if owner is not None else None
        )
        if line is not None:
            return f" ({line})"
    return ""


def _differs(before: object, now: object) -> bool:
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return before is not now
    if isinstance(now, bool | int | float | str) or now is None:
        return before != now
    return False


class AttributeState:
    """Attributes of one module, so that what a forward pass assigns can be taken back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values = dict(vars(module))
        self._contents = {
            name: value.copy()
            for name, value in self.values.items()
            if isinstance(value, list | dict | set)
        }

    def restore(self) -> None:
        """Set them as they were."""
        attributes = vars(self._module)
        attributes.clear()
        attributes.update(self.values)
        for name, content in self._contents.items():
            value = self.values[name]
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)


def attribute_states(model: nn.Module) -> list[AttributeState]:
    """Attributes of all modules of a model."""
    return [AttributeState(module) for module in model.modules()]
