"""Operators that stand in a traced graph for what torch cannot trace. No node ever calls them: the
calls of a program are written in their place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SPACE = "hypergpu_trace"
GRADIENTS = f"{SPACE}.gradients.default"
"""Gives stand-ins of the gradients of a function's outputs. What follows, up to `RULE`, is its
backward pass.
"""
RULE = f"{SPACE}.rule.default"
"""Ends the backward pass, and gives the outputs whose gradient it is."""
GRAD = f"{SPACE}.grad.default"
"""As torch.autograd.grad."""
REQUIRES = f"{SPACE}.requires_grad_.default"
"""As Tensor.requires_grad_."""
CTC = f"{SPACE}.ctc_loss.default"
"""As torch.ctc_loss."""
_LIBRARY = torch.library.Library(SPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def mark(name: str) -> Callable[..., Any]:
    """The operator of one of the names above."""
    operator: Callable[..., Any] = getattr(getattr(torch.ops, SPACE), name.split(".")[1])
    return operator


def _define(schema: str, shapes: Callable[..., Any]) -> None:
    """Make one, with a function that gives empty results."""
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{SPACE}::{schema.partition('(')[0]}", shapes, lib=_LIBRARY)


def _stand_ins(outputs: Sequence[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(each) for each in outputs]


def _like_outputs(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    number: int,
) -> list[Tensor]:
    return [torch.empty_like(each) for each in outputs]


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor], keeps: bool
) -> list[Tensor]:
    return [torch.empty_like(each) for each in inputs]


def _give_nothing(x: Tensor) -> None:
    """Nothing: the mark alone counts."""


def _ctc(
    scores: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, *others: Any
) -> Tensor:
    return scores.new_empty(lengths.shape if others[1] == 0 else ())


_define("gradients(Tensor[] outputs, int number) -> Tensor[]", _stand_ins)
_define(
    "rule(Tensor[] inputs, Tensor[] outputs, Tensor?[] gradients, int number) -> Tensor[]",
    _like_outputs,
)
_define(
    "grad(Tensor[] outputs, Tensor[] inputs, Tensor[] given, bool keeps) -> Tensor[]", _gradients
)
_define("requires_grad_(Tensor(a!) x) -> ()", _give_nothing)
_define(
    "ctc_loss(Tensor scores, Tensor targets, Tensor lengths, Tensor target_lengths, int blank,"
    " int reduction, bool zero_infinity) -> Tensor",
    _ctc,
)
