"""How far the values of a module and of its program are apart."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hypergpu.workloads.networks.module_under_test import StepValues, plain_tensor

TOLERANCE = 1e-4
"""Relative to the length of the value, in float32."""
_LEAST_SHARE = 1e-3
"""A gradient shorter than this share of all is measured by the share: below it is rounding, as of
a bias before a normalisation.
"""


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


def difference_of(one: StepValues, other: StepValues) -> Difference | None:
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
    mine, theirs = plain_tensor(one).double(), plain_tensor(other).double()
    gap = (mine - theirs)[mine != theirs]
    length = float(gap.norm()) if gap.numel() else 0.0
    return length / max(float(mine.norm()), least, 1e-12) if length else 0.0
