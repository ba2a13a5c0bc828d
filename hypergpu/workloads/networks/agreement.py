"""Compares a program with the module that it was traced of, on one real batch.

Both take a training step's gradients and an evaluation from the same weights with the same seed.
What differs is refused before anything is sent: a node would train something else.
"""

import torch
from torch import nn

from hypergpu.programs.container import ProgramError
from hypergpu.workloads.networks.differences import Difference, difference_of
from hypergpu.workloads.networks.fixed_draws import fixed_draws
from hypergpu.workloads.networks.graph_runner import failed_call
from hypergpu.workloads.networks.module_under_test import (
    ModuleStep,
    ModuleUnderTest,
    StepValues,
    seed_generators,
)
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.source_lines import short
from hypergpu.workloads.networks.tracing import TracedProgram

_PACKAGE_FIX = (
    "Fix: give the module itself to nodes as a workload package,"
    " see docs/workloads.md#your-own-as-a-package"
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
        difference = difference_of(seen.values, _program_step(tested, workload))
        if difference is not None:
            difference = _look_again(tested, workload)
        later = None
        if difference is None and seen.changed:
            two = tested.step(2).values
            later = difference_of(two, _program_step(tested, workload, steps=2))
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
    if (changes := difference_of(once, again)) is not None:
        raise ProgramError(
            f"the model gives other values each time, with the same seed: {changes}."
            " Fix: make it depend on its inputs and torch's random numbers alone"
        )
    with fixed_draws():
        theirs = _program_step(tested, workload)
    return difference_of(once, theirs)


def _program_step(tested: ModuleUnderTest, workload: ProgramWorkload, steps: int = 1) -> StepValues:
    """What a program gives of the same batch."""
    twin = workload.model().to(tested.device).train()
    devices = {tested.device} if tested.device.type == "cuda" else set()
    with torch.random.fork_rng(devices):
        loss = torch.zeros(())
        for number in range(steps):
            seed_generators(number)
            loss = workload.loss(twin, *(each.clone() for each in tested.fields))
        if not loss.requires_grad:
            raise RuntimeError("no gradient flows from its loss")
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: each.grad for name, each in twin.named_parameters() if each.grad is not None
        }
        state = {name: each.detach().clone() for name, each in twin.state_dict().items()}
        twin.eval()
        seed_generators(steps)
        with torch.no_grad():
            evaluation = workload.mean_values(twin, *(each.clone() for each in tested.fields))
    return StepValues(loss.detach(), gradients, state, evaluation)


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
