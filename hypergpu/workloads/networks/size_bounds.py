"""Sizes of results before a call computes them: how many parts a call gives, and the largest result
of calls whose size depends on values.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_MASKS = (torch.bool, torch.uint8)


def _of_unbind(x: Tensor, dim: int = 0) -> int:
    return x.shape[dim]


def _of_split(x: Tensor, size: int, dim: int = 0) -> int:
    return -(-x.shape[dim] // size) if size > 0 else 1


def _of_sections(x: Tensor, sections: int, dim: int = 0) -> int:
    return operator.index(sections)


def _of_tensor_sections(x: Tensor, sections: Tensor, dim: int = 0) -> int:
    return sections.numel() + 1 if sections.dim() else int(sections)


PARTS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "aten.unbind.int": _of_unbind,
        "aten.split.Tensor": _of_split,
        "aten.chunk.default": _of_sections,
        "aten.tensor_split.sections": _of_sections,
        "aten.tensor_split.tensor_indices_or_sections": _of_tensor_sections,
        "aten.hsplit.int": _of_sections,
        "aten.vsplit.int": _of_sections,
        "aten.dsplit.int": _of_sections,
    }
)
"""How many results a call gives, by operator and of its arguments."""


def _positions(x: Tensor) -> Tensor:
    return torch.empty((x.numel(), x.dim()), dtype=torch.int64, device="meta")


def _position_list(x: Tensor) -> list[Tensor]:
    return [torch.empty(x.numel(), dtype=torch.int64, device="meta") for _ in range(x.dim() or 1)]


def _selection_bound(x: Tensor, mask: Tensor) -> Tensor:
    # Only its size counts, which that of a sum has.
    return torch.empty((x + mask).numel(), dtype=x.dtype, device="meta")


def _distinct(
    x: Tensor, is_sorted: bool = True, has_inverse: bool = False, has_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    count = x.numel()
    inverse = torch.empty(x.shape, dtype=torch.int64, device="meta")
    counts = torch.empty(count, dtype=torch.int64, device="meta")
    return torch.empty(count, dtype=x.dtype, device="meta"), inverse, counts


def _index_bound(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    whole: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            whole += _position_list(index)
        else:
            whole.append(index)
    result: Tensor = torch.ops.aten.index.Tensor(x, whole)
    return result


def _batch_norm(x: Tensor, *others: Any) -> Tensor:
    """As aten.batch_norm, which makes NaN of one value per channel where the module refuses it."""
    is_training = bool(others[4])
    if is_training and x.numel() == x.shape[1]:
        raise ValueError(
            "BatchNorm needs more than one value per channel in training, and has one of a"
            " micro-batch of one sample"
        )
    result: Tensor = torch.ops.aten.batch_norm.default(x, *others)
    return result


def _ctc(scores: Tensor, targets: Tensor, lengths: Tensor, *others: Any) -> Tensor:
    reduction = others[2] if len(others) > 2 else 1
    return torch.empty(lengths.shape if reduction == 0 else (), dtype=scores.dtype, device="meta")


def _like_input(x: Tensor, *others: Any) -> Tensor:
    """Operators that torch cannot run without data."""
    return torch.empty_like(x)


BOUNDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten.nonzero.default": _positions,
        "aten.argwhere.default": _positions,
        "aten.nonzero_numpy.default": _position_list,
        "aten.where.default": _position_list,
        "aten.masked_select.default": _selection_bound,
        "aten._unique2.default": _distinct,
        "aten.index.Tensor": _index_bound,
        "aten.batch_norm.default": _batch_norm,
        "aten.ctc_loss.Tensor": _ctc,
        "aten.fake_quantize_per_tensor_affine.default": _like_input,
        "aten.fake_quantize_per_tensor_affine.tensor_qparams": _like_input,
        "aten.fake_quantize_per_channel_affine.default": _like_input,
        "aten._fake_quantize_learnable_per_tensor_affine.default": _like_input,
        "aten._fake_quantize_learnable_per_channel_affine.default": _like_input,
    }
)
"""What stands for an operator where tensors hold nothing: the largest result that values give, and
what the operator itself does not refuse.
"""
