"""Folds what several rings trained of a layer: the mean pseudo-gradient, and the outer step.

A layer is what stages keep of it: values, as many first and second moments of AdamW, and the number
of steps, in little-endian float32. The values are folded; each ring keeps moments and steps of its
own, as participants of a DiLoCo round do (arXiv:2311.08105).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coordinator.shell.aggregation.arithmetic import OuterStep, is_all_finite
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.layout import Float32s

_PARTS = 3
"""Values and two moments."""


class LayerPart(NamedTuple):
    """What a ring gave of a layer."""

    content: bytes
    weight: int
    """Tokens that counted in its loss."""


class FoldedLayer(NamedTuple):
    """A layer from which rings go on."""

    contents: tuple[bytes, ...]
    """For each ring in order the folded values, with its own moments and steps."""
    momentum: bytes
    """Outer momentum; empty: it is zero."""


def fold_layer(
    before: bytes, parts: Sequence[LayerPart], momentum: bytes, outer: Outer
) -> FoldedLayer:
    """``D = x - sum(w_r x_r)``, ``m <- mu m + D``, ``x <- x - lr (D + mu m)``.

    Weights are shares of all rings' tokens. Float32, in the order of the rings: the same bits
    whenever it is done again.

    Args:
        before: The layer that the rings began the round with, of any of them.
        parts: What each of them gave.
        momentum: Outer momentum of the rounds before; empty: it is zero.
        outer: The outer step.

    Raises:
        HyperGPUError: REQUEST_INVALID, a part has another size, or is not finite.
    """
    values = _values(before)
    if any(len(each.content) != len(before) for each in parts):
        raise HyperGPUError(Reason.REQUEST_INVALID, "adapters of rings differ in size")
    total_weight = sum(each.weight for each in parts)
    difference = values.copy()
    for each in parts:
        share = np.float32(each.weight / total_weight)
        difference -= share * _values(each.content)
    new_values = np.empty_like(values)
    new_momentum = np.empty_like(values) if outer.momentum else None
    old_momentum = np.frombuffer(momentum, "<f4").astype(np.float32) if momentum else None
    with np.errstate(over="ignore", invalid="ignore"):  # It is looked at below.
        OuterStep(outer).take(
            difference,
            values,
            old_momentum if outer.momentum else None,
            out_parameters=new_values,
            out_momentum=new_momentum,
        )
    if not is_all_finite(new_values):
        raise HyperGPUError(Reason.REQUEST_INVALID, "the folded adapter is not finite")
    head = new_values.astype("<f4", copy=False).tobytes()
    momentum_bytes = b"" if new_momentum is None else new_momentum.astype("<f4").tobytes()
    return FoldedLayer(tuple(head + each.content[len(head) :] for each in parts), momentum_bytes)


def _values(content: bytes) -> Float32s:
    count = (len(content) // 4 - 1) // _PARTS
    return np.frombuffer(content, "<f4", count).astype(np.float32)
