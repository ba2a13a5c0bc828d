"""Operators that no program may call, written by those that it may, while a model is traced.

What torch composes of other operators is composed of them here; a few are written anew.
"""

import io
import logging
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import decompose
from torch.nn import functional as F
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from hypergpu.programs.container import ProgramError
from hypergpu.programs.operators import OPERATORS
from hypergpu.workloads.networks.marks import CTC, mark
from hypergpu.workloads.networks.patching import replace_attribute
from hypergpu.workloads.networks.source_lines import called_line


def _bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scales_by_frequency: bool = False,
    mode: int = 0,
    is_sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    includes_last: bool = False,
    padding: int | None = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An embedding bag, of an embedding and a reduction over each bag."""
    starts = offsets[:-1] if includes_last else offsets
    bags = starts.shape[0]
    places = torch.arange(indices.shape[0], device=indices.device)
    bag = torch.bucketize(places, starts, right=True) - 1
    rows = torch.nn.functional.embedding(indices, weight)
    width = weight.shape[1]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    count_mask = torch.ones_like(indices, dtype=weight.dtype)
    if padding is not None and padding >= 0:
        count_mask = (indices != padding).to(weight.dtype)
    spread = bag.unsqueeze(1).expand(-1, width)
    if mode == 2:
        masked_rows = rows.masked_fill(count_mask.unsqueeze(1) == 0, float("-inf"))
        empty = weight.new_full((bags, width), float("-inf"))
        most = empty.scatter_reduce(0, spread, masked_rows, "amax")
        pooled_rows = most.masked_fill(most == float("-inf"), 0.0)
    else:
        pooled_rows = weight.new_zeros((bags, width))
        pooled_rows = pooled_rows.scatter_add(0, spread, rows * count_mask.unsqueeze(1))
        if mode == 1:
            counts = weight.new_zeros((bags,)).scatter_add(0, bag, count_mask)
            pooled_rows = pooled_rows / counts.clamp(min=1).unsqueeze(1)
    return pooled_rows, bag, count_mask, bag


def _bag_default(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _bag(*arguments)


def _renormalise(weight: Tensor, indices: Tensor, most: float, order: float) -> Tensor:
    """Scale down the rows of a table that are looked up and longer than allowed."""
    norms = torch.linalg.vector_norm(weight, order, dim=1)
    is_used = torch.zeros_like(norms).index_fill(0, indices.reshape(-1), 1.0) > 0
    scale = torch.where(is_used & (norms > most), most / (norms + 1e-7), torch.ones_like(norms))
    return weight.mul_(scale.unsqueeze(1))


def _new_zeros(x: Tensor, size: list[int], stride: list[int], **named: Any) -> Tensor:
    return x.new_zeros(size, **_memory_options(named))


def _zeros(size: list[int], stride: list[int], **named: Any) -> Tensor:
    return torch.zeros(size, **_memory_options(named))


def _memory_options(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: named[name] for name in ("dtype", "device") if named.get(name) is not None}


_REWRITTEN: dict[str, Callable[..., Any]] = {
    "aten.embedding_bag.padding_idx": _bag,
    "aten.embedding_bag.default": _bag_default,
    "aten.embedding_renorm_.default": _renormalise,
    "aten.new_empty_strided.default": _new_zeros,
    "aten.empty_strided.memory_format": _zeros,
}


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """As the hint says; a mask's values are not looked at, and it is applied anyway."""
    return bool(is_causal)


class _Rewriting(Mapping[Any, Callable[..., Any]]):
    """How an operator is written by others; torch asks for each that it meets."""

    def __contains__(self, operator: object) -> bool:
        return self._find(operator) is not None

    def __getitem__(self, operator: Any) -> Callable[..., Any]:
        rewritten = self._find(operator)
        if rewritten is None:
            raise KeyError(operator)
        return rewritten

    def __iter__(self) -> Iterator[Any]:
        return iter(_REWRITTEN)

    def __len__(self) -> int:
        return len(_REWRITTEN)

    @staticmethod
    def _find(operator: Any) -> Callable[..., Any] | None:
        name = str(operator)
        if name in OPERATORS or not name.startswith("aten."):
            return None
        if name in _REWRITTEN:
            return _REWRITTEN[name]
        if name.endswith("out"):
            return _without_out(operator)
        key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - no public name
        if operator.has_kernel_for_dispatch_key(key):
            rewritten: Callable[..., Any] = operator.decompose
            return rewritten
        return None


def _without_out(operator: Any) -> Callable[..., Any] | None:
    """A call that writes into ``out`` as one that gives a result, and a copy."""
    packet = operator.overloadpacket
    operator_inputs = _inputs_of(operator)
    overloads = [getattr(packet, name) for name in packet.overloads() if not name.endswith("out")]
    others = [each for each in overloads if _inputs_of(each) == operator_inputs]
    if not others or len(operator._schema.returns) != 1:  # noqa: SLF001 - no public name
        return None

    def call(*arguments: Any, out: Tensor, **named: Any) -> Tensor:
        return out.copy_(others[0](*arguments, **named))

    return call


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Torch finds the size of what it saves by the values of the lengths, which a trace has not."""
    lengths = [torch.as_tensor(each, dtype=torch.int64) for each in (input_lengths, target_lengths)]
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    loss: Tensor = mark(CTC)(log_probs, targets, *lengths, blank, number, zero_infinity)
    return loss.requires_grad_() if log_probs.requires_grad else loss


def _gaussian(
    input: Tensor,  # noqa: A002 - torch's name
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Torch looks at the values of ``var`` before."""
    spread = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if spread.shape != input.shape and spread.shape[-1:] != (1,):
        spread = spread.unsqueeze(-1)
    bound = spread + (spread.clamp(min=eps) - spread).detach()
    loss = 0.5 * (bound.log() + (input - target) ** 2 / bound)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _counts(
    input: Tensor,  # noqa: A002 - torch's name
    weights: Tensor | None = None,
    minlength: int = 0,
) -> Tensor:
    """Torch finds the size of the result by the greatest value, which a trace has not."""
    if not minlength:
        raise ProgramError(
            f"torch.bincount gives as many counts as the greatest value says ({called_line()})."
            " Fix: torch.bincount(x, minlength=classes), where each value is below classes"
        )
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros((minlength,)).scatter_add(0, input.long(), weights)


_FUNCTIONS = {
    F.ctc_loss: _ctc,
    F.gaussian_nll_loss: _gaussian,
    torch.bincount: _counts,
    Tensor.bincount: _counts,
}
_DISTANCE_BY_SIZE = "use_mm_for_euclid_dist_if_necessary"
_DISTANCE = "donot_use_mm_for_euclid_dist"


def _inputs_of(operator: Any) -> list[str]:
    """Types of an operator's arguments, but of what it writes into."""
    arguments = operator._schema.arguments  # noqa: SLF001 - it has no public name
    return [str(each.type) for each in arguments if not each.is_out]


class _Functions(TorchFunctionMode):
    """Calls that no trace can hold as they are."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        # Nodes seed torch's global generator, and have no other.
        if keywords.get("generator") is not None:
            del keywords["generator"]
        # Which way it computes would depend on the size of the batch.
        if function is torch.cdist and keywords.get("compute_mode") == _DISTANCE_BY_SIZE:
            keywords["compute_mode"] = _DISTANCE
        return _FUNCTIONS.get(function, function)(*args, **keywords)


@contextmanager
def rewriting() -> Iterator[None]:
    """Write operators by those of programs while a model runs, inside of a trace."""
    distribution = torch.distributions.Distribution
    checks = distribution._validate_args  # noqa: SLF001 - it has a setter alone
    distribution.set_default_validate_args(False)
    masks = replace_attribute(transformer, "_detect_is_causal_mask", _is_causal)
    try:
        with decompose(_Rewriting()), _Functions(), masks:
            yield
    finally:
        distribution.set_default_validate_args(checks)


class _Silenced(io.TextIOBase):
    """Drops what one thread writes, and passes on what others do."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def silent_torch() -> Iterator[None]:
    """Keep torch's graphs, logs and warnings about a trace from the user's terminal."""
    thread = threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger)
    ]
    for logger in loggers:
        logger.addFilter(is_elsewhere)
    try:
        with warnings.catch_warnings(), redirect_stderr(_Silenced(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_elsewhere)
