"""Compares a program with the module that it was traced of, on one real batch.

Both take a training step's gradients and an evaluation from the same weights with the same seed.
What differs is refused before anything is sent: a node would train something else.
"""

import math
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
from hypergpu.workloads.networks.fixed_draws import fixed_draws
from hypergpu.workloads.networks.graph_calls import dtype_name
from hypergpu.workloads.networks.graph_runner import failed_call
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.source_lines import raised_line, short
from hypergpu.workloads.networks.traceable import (
    AttributeState,
    ChangedAttribute,
    attribute_states,
    changed_attributes,
    tensor_place,
)
from hypergpu.workloads.networks.tracing import BatchShape, Loss, Measure, TracedProgram

TOLERANCE = 1e-4
"""Relative to the length of the value, in float32."""
_LEAST_SHARE = 1e-3
"""A gradient shorter than this share of all is measured by the share: below it is rounding, as of
a bias before a normalisation.
"""
_SEED = 1234
_PACKAGE_FIX = (
    "Fix: give the module itself to nodes as a workload package,"
    " see docs/workloads.md#your-own-as-a-package"
)


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
                _seed(number)
                loss, *_ = self._run()
            gradients = self._gradients(loss)
            changed = changed_attributes(states, self.model)
            state = _state_of(self.model)
            self.model.eval()
            _seed(steps)
            with torch.set_grad_enabled(evaluates_with_gradients):
                evaluation = [each.detach() for each in self._run()]
        after = _other_generators()
        elsewhere = next((name for name in before if before[name] != after[name]), "")
        values = StepValues(loss.detach(), gradients, state, evaluation)
        return ModuleStep(values, changed, elsewhere, self._outputs(evaluation))

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
            gradient = _plain(parameter.grad)
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def _late_parameter(self, late: nn.Parameter) -> ProgramError:
        named = dict(self.model.named_parameters())
        name = next((name for name, each in named.items() if each is late), "a parameter")
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
        told = short(str(error)) or "no reason told"
        if "more than 1 value per channel" in told:
            return ProgramError(
                f"BatchNorm needs more than one value per channel{place}, and a batch of"
                f" {several(len(self.fields[0]), 'sample')} has one. Fix: a larger batch_size"
            )
        return ProgramError(
            f"the model or loss itself fails{place}: {type(error).__name__}: {told}."
            f" Fix: make loss(model, batch) run on a batch of {batch}"
        )


def check_agreement(
    tested: ModuleUnderTest, seen: ModuleStep, traced: TracedProgram, workload: ProgramWorkload
) -> None:
    """Compare a module with its program.

    Takes a step and an evaluation of the program; where they differ, a few more.

    Args:
        tested: The module.
        seen: What it gave.
        traced: Its program, with the lines of its calls.
        workload: The same as nodes have it.

    Raises:
        ProgramError: They differ. The text says in what, by how much and what to do.
    """
    if seen.draws_elsewhere:
        line = traced.line_of("train")
        raise ProgramError(
            f"the forward pass draws random numbers from {seen.draws_elsewhere} ({line}), and a"
            " program has torch's alone. Fix: draw with torch.rand"
        )
    _refuse_not_finite(seen.values, traced)
    try:
        difference = _difference(seen.values, _program_step(tested, workload))
        if difference is not None:
            difference = _look_again(tested, workload)
        later = None
        if difference is None and seen.changed:
            two = tested.step(2).values
            later = _difference(two, _program_step(tested, workload, steps=2))
    except RuntimeError as error:
        line = traced.lines.get(failed_call(error) or ("", 0)) or traced.line_of("train")
        raise ProgramError(
            f"the model's program fails where the model does not ({line}): {short(str(error))}."
            f" {_PACKAGE_FIX}"
        ) from error
    if seen.changed and (difference or later):
        raise ProgramError(
            f"the forward pass sets {seen.changed[0]}, which changes what the next one computes:"
            f" {difference or later}. Fix: register_buffer, and change it in place"
        )
    if difference is not None:
        raise _refusal(tested, traced, difference)


def _look_again(tested: ModuleUnderTest, workload: ProgramWorkload) -> "Difference | None":
    """Whether they differ where both draw alike and evaluate alike.

    An operator of a program may draw in another order than the module's, or take another kernel.
    """
    with fixed_draws():
        once = tested.step(evaluates_with_gradients=True).values
    with fixed_draws():
        again = tested.step(evaluates_with_gradients=True).values
    if (changes := _difference(once, again)) is not None:
        raise ProgramError(
            f"the model gives other values each time, with the same seed: {changes}."
            " Fix: make it depend on its inputs and torch's random numbers alone"
        )
    with fixed_draws():
        theirs = _program_step(tested, workload)
    return _difference(once, theirs)


def _program_step(tested: ModuleUnderTest, workload: ProgramWorkload, steps: int = 1) -> StepValues:
    """What a program gives of the same batch."""
    twin = workload.model().to(tested.device).train()
    devices = {tested.device} if tested.device.type == "cuda" else set()
    with torch.random.fork_rng(devices):
        loss = torch.zeros(())
        for number in range(steps):
            _seed(number)
            loss = workload.loss(twin, *(each.clone() for each in tested.fields))
        if not loss.requires_grad:
            raise RuntimeError("no gradient flows from its loss")
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: each.grad for name, each in twin.named_parameters() if each.grad is not None
        }
        state = {name: each.detach().clone() for name, each in twin.state_dict().items()}
        twin.eval()
        _seed(steps)
        with torch.no_grad():
            evaluation = workload.mean_values(twin, *(each.clone() for each in tested.fields))
    return StepValues(loss.detach(), gradients, state, evaluation)


class Difference(NamedTuple):
    """The first value in which two steps differ."""

    what: str
    """Such as ``the gradient of a.weight``."""
    tensor: str
    """Name of the tensor that it is about; empty: none."""
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.what} differs by {self.relative:.2g} of its length, and at most"
            f" {TOLERANCE:g} is rounding in float32"
        )


def _difference(one: StepValues, other: StepValues) -> Difference | None:
    """The first difference of two steps; the first of them is right."""
    floor = _LEAST_SHARE * math.hypot(*(float(each.norm()) for each in one.gradients.values()))
    for what, tensor, mine, theirs, least in _pairs(one, other, floor):
        share = relative_difference(mine, theirs, least)
        if share > TOLERANCE:
            return Difference(what, tensor, share)
    return None


_Pair = tuple[str, str, Tensor | None, Tensor | None, float]


def _pairs(one: StepValues, other: StepValues, floor: float) -> Iterator[_Pair]:
    yield "the training loss", "", one.loss, other.loss, 0.0
    for name in one.gradients.keys() | other.gradients.keys():
        mine, theirs = one.gradients.get(name), other.gradients.get(name)
        yield f"the gradient of {name}", name, mine, theirs, floor
    for name in sorted(one.state.keys() & other.state.keys()):
        yield f"{name} after a step", name, one.state[name], other.state[name], 0.0
    for number, (mine, theirs) in enumerate(zip(one.evaluation, other.evaluation, strict=True)):
        what = f"metric {number} in evaluation" if number else "the loss in evaluation"
        yield what, "", mine, theirs, 0.0


def relative_difference(one: Tensor | None, other: Tensor | None, least: float) -> float:
    """Length of the difference over that of the first value, or over ``least`` if that is more."""
    if one is None or other is None:
        present = one if other is None else other
        if present is None:
            return 0.0
        one, other = torch.zeros_like(present), present
    if one.shape != other.shape:
        return float("inf")
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    mine, theirs = _plain(one).double(), _plain(other).double()
    gap = (mine - theirs)[mine != theirs]
    length = float(gap.norm()) if gap.numel() else 0.0
    return length / max(float(mine.norm()), least, 1e-12) if length else 0.0


def _refusal(
    tested: ModuleUnderTest, traced: TracedProgram, difference: Difference
) -> ProgramError:
    owner = _owner_of(tested.model, difference.tensor)
    graph = "evaluate" if "evaluation" in difference.what else "train"
    line = traced.line_of(graph, difference.tensor)
    return ProgramError(
        f"the model's program computes otherwise than {owner} does ({line}): {difference}."
        f" {_PACKAGE_FIX}"
    )


def _owner_of(model: nn.Module, name: str) -> str:
    """Class of the module that has a tensor, and its path; of the whole, where none has it."""
    path = name.rpartition(".")[0]
    owner = dict(model.named_modules()).get(path, model)
    kind = type(owner).__name__
    return f"{kind} {path}" if path and owner is not model else kind


def _refuse_not_finite(values: StepValues, traced: TracedProgram) -> None:
    wrong = [name for name, each in values.gradients.items() if not bool(each.isfinite().all())]
    if not bool(values.loss.isfinite().all()):
        raise ProgramError(
            f"the loss ({traced.line_of('train')}) is {float(values.loss)} on the first batch,"
            " before any step."
            " Fix: look for huge or missing values in the data"
        )
    if wrong:
        raise ProgramError(
            f"the gradient of {wrong[0]} ({traced.line_of('train', wrong[0])}) is not finite on"
            " the first batch."
            " Fix: bound what it divides by, or takes the logarithm or root of"
        )


def _trained_names(model: nn.Module) -> dict[Tie, str]:
    names: dict[Tie, str] = {}
    state = dict(model.state_dict(keep_vars=True)) | dict(model.named_parameters())
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            names.setdefault(tie_of(tensor), name)
    return names


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    named: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: _plain(each).clone() for name, each in named.items()}


def _plain(tensor: Tensor) -> Tensor:
    """A tensor's values, dense and real."""
    values = tensor.detach()
    values = values.to_dense() if values.is_sparse else values
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _seed(number: int) -> None:
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
