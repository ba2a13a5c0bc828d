"""A user's module, trained and evaluated on one batch as torch does it, without lasting effects."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hypergpu.process import is_out_of_memory
from hypergpu.programs.container import DTYPES, ProgramError
from hypergpu.programs.ties import Tie, tie_of
from hypergpu.units import several
from hypergpu.workloads.networks.graph_calls import dtype_name
from hypergpu.workloads.networks.source_lines import raised_line, short
from hypergpu.workloads.networks.traceable import (
    AttributeState,
    ChangedAttribute,
    attribute_states,
    changed_attributes,
    tensor_place,
)
from hypergpu.workloads.networks.tracing import BatchShape, Loss, Measure

_SEED = 1234


class StepValues(NamedTuple):
    """What a training step and an evaluation give."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """By names of trained tensors; a complex one as its real and imaginary parts."""
    state: dict[str, Tensor]
    """Every tensor of the model's own after the step, by name."""
    evaluation: list[Tensor]
    """Loss, metrics and outputs."""


class ModuleStep(NamedTuple):
    """What a module gave, and what it did beside."""

    values: StepValues
    changed: list[ChangedAttribute]
    """Attributes that the forward pass sets."""
    draws_elsewhere: str
    """Name of another generator of random numbers than torch's that it drew from; empty: none."""
    outputs: dict[str, Tensor]
    """What evaluation gave besides loss and metrics, by name, on the CPU."""


class ModuleUnderTest:
    """A user's module with its loss and one batch. It is left as it was.

    Args:
        model: The module, on any device.
        loss: See `Loss`.
        shape: How the loss gets its batch.
        fields: One batch of real samples.
        wants_outputs: Whether evaluation gives outputs besides loss and metrics.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        shape: BatchShape,
        fields: Sequence[Tensor],
        *,
        wants_outputs: bool = False,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.fields = [each.to(self.device) for each in fields]
        self._measure = Measure(loss, shape, wants_outputs=wants_outputs)
        self._shape = shape
        self._names = _trained_names(model)

    def step(self, steps: int = 1, *, evaluates_with_gradients: bool = False) -> ModuleStep:
        """Take a training step's gradients, and evaluate.

        Args:
            steps: Forward passes in all; the last one is told.
            evaluates_with_gradients: Whether evaluation notes gradients. Without, some modules of
                torch take another way, which rounds otherwise.

        Raises:
            ProgramError: It fails. The text says where.
        """
        before = _other_generators()
        with _preserve_tensors(self.model) as states:
            self.model.train()
            loss = torch.zeros(())
            for number in range(steps):
                seed_generators(number)
                loss, *_ = self._run()
            gradients = self._gradients(loss)
            attributes = changed_attributes(states, self.model)
            state = _state_of(self.model)
            self.model.eval()
            seed_generators(steps)
            with torch.set_grad_enabled(evaluates_with_gradients):
                evaluation = [each.detach() for each in self._run()]
        after = _other_generators()
        elsewhere = next((name for name in before if before[name] != after[name]), "")
        values = StepValues(loss.detach(), gradients, state, evaluation)
        return ModuleStep(values, attributes, elsewhere, self._outputs(evaluation))

    def _outputs(self, evaluation: Sequence[Tensor]) -> dict[str, Tensor]:
        """Outputs of an evaluation, each checked.

        Raises:
            ProgramError: One has another first dimension than the batch, or a type that no program
                has.
        """
        names = self._measure.outputs
        outputs = dict(zip(names, evaluation[len(evaluation) - len(names) :], strict=True))
        count = len(self.fields[0])
        for name, each in outputs.items():
            if tuple(each.shape[:1]) != (count,):
                raise ProgramError(
                    f"the output {name} has shape {list(each.shape)}, and its first dimension must"
                    f" be the batch's {several(count, 'sample')}. Fix: give a value for each sample"
                )
            if (kind := dtype_name(each.dtype)) not in DTYPES:
                raise ProgramError(
                    f"the output {name} is of type {kind}. Fix: make it one of"
                    f" {', '.join(sorted(DTYPES))}"
                )
        return {name: each.cpu() for name, each in outputs.items()}

    def _run(self) -> tuple[Tensor, ...]:
        try:
            return self._measure(self.model, [each.clone() for each in self.fields])
        except ProgramError:
            raise
        except Exception as error:  # it is the user's code
            raise self._failure(error) from error

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        if loss.numel() != 1:
            raise ProgramError(
                f"the loss has shape {list(loss.shape)}, and must be one number. Fix: loss.mean()"
            )
        if not loss.requires_grad:
            raise ProgramError(
                "the loss depends on no trained parameter: no gradient flows from it."
                " Fix: remove detach() or no_grad() between the parameters and the loss"
            )
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise self._failure(error) from error
        gradients: dict[str, Tensor] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            name = self._names.get(tie_of(parameter), "")
            if not name:
                raise self._late_parameter(parameter)
            gradient = plain_tensor(parameter.grad)
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def _late_parameter(self, late: nn.Parameter) -> ProgramError:
        parameters = dict(self.model.named_parameters())
        name = next((name for name, each in parameters.items() if each is late), "a parameter")
        place = tensor_place(self.model, name)
        return ProgramError(
            f"{name}{place} is made by the forward pass, and no optimizer would step it."
            " Fix: make it in __init__"
        )

    def _failure(self, error: Exception) -> ProgramError:
        line = raised_line(error)
        place = f" ({line})" if line else ""
        batch = ", ".join(
            f"{name} {str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
            for name, each in zip(self._shape.names, self.fields, strict=True)
        )
        if is_out_of_memory(error):
            return ProgramError(
                f"the model or loss takes more memory than there is{place}, on a batch of {batch}."
                " Fix: a smaller batch_size"
            )
        error_text = short(str(error)) or "no reason told"
        if "more than 1 value per channel" in error_text:
            return ProgramError(
                f"BatchNorm needs more than one value per channel{place}, and a batch of"
                f" {several(len(self.fields[0]), 'sample')} has one. Fix: a larger batch_size"
            )
        return ProgramError(
            f"the model or loss itself fails{place}: {type(error).__name__}: {error_text}."
            f" Fix: make loss(model, batch) run on a batch of {batch}"
        )


def _trained_names(model: nn.Module) -> dict[Tie, str]:
    names: dict[Tie, str] = {}
    state = dict(model.state_dict(keep_vars=True)) | dict(model.named_parameters())
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            names.setdefault(tie_of(tensor), name)
    return names


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    tensors: Mapping[str, Tensor] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    return {name: plain_tensor(each).clone() for name, each in tensors.items()}


def plain_tensor(tensor: Tensor) -> Tensor:
    """A tensor's values, dense and real."""
    values = tensor.detach()
    values = values.to_dense() if values.is_sparse else values
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def seed_generators(number: int) -> None:
    torch.manual_seed(_SEED + number)


def _other_generators() -> dict[str, object]:
    """States of generators that programs have not."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - it looks for who uses it
    return {"Python's random": random.getstate(), "numpy": repr(numpy_state)}


@contextmanager
def _preserve_tensors(model: nn.Module) -> Iterator[list[AttributeState]]:
    """Leave tensors, gradients, modes, attributes and random numbers as they were."""
    states = attribute_states(model)
    tensors = [*model.parameters(), *model.buffers()]
    values = [each.detach().clone() for each in tensors]
    gradients = [(each, each.grad) for each in model.parameters()]
    toggles = [(each, each.requires_grad) for each in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = {each.device for each in tensors if each.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield states
    finally:
        for state in states:
            state.restore()
        for parameter, is_trained in toggles:
            parameter.requires_grad_(is_trained)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
