"""Whether rows of one sample see each other in a base, tried on the base itself.

Models of transformers tell rows apart by positions that begin anew, by a mask of blocks, or not at
all: recurrent and convolutional layers carry a row on into the next. No list of models says which,
so two rows are tried beside each other and alone.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.base_model import first_sentence

_TRIAL_SEED = 20_261_128
_FIRST, _SECOND = 11, 7
"""Tokens of the two rows that are tried."""
_EQUAL = {torch.float32: 1e-3}
_NEARLY_EQUAL = 0.1
"""Differences of logits, in their standard deviations, that are rounding: for float32 and for
coarser types. Rows that see each other differ by 0.06 and more.
"""
_LEAK = {torch.float32: 1e-4}
_LEAK_COARSE = 1e-2
_WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size")
_DECODER = "give a causal language model, such as SmolLM2"
_SLIDING, _FULL = "sliding_attention", "full_attention"


class RowSeparation(Enum):
    """What keeps rows of one sample apart."""

    POSITIONS = "positions"
    """Positions that begin at 0 with each row."""
    MASK = "mask"
    """These, and a mask of blocks."""
    LAYER_MASKS = "layer_masks"
    """These, and a mask for each kind of attention layer."""
    ALONE = "alone"
    """Nothing: each row is a sample of its own, and the model gets nothing but its tokens."""


class SeparatedInputs(NamedTuple):
    """How a base gets rows of one sample."""

    separation: RowSeparation
    mask_dtype: torch.dtype = torch.float32
    window: int = 0
    """Tokens that a layer with a sliding window sees; 0: no layer has one."""

    def arguments(self, positions: Tensor) -> dict[str, Any]:
        """Arguments of the model beside the tokens.

        Args:
            positions: ``int[b, t]``, which begin at 0 with each row.
        """
        if self.separation is RowSeparation.ALONE:
            return {}
        arguments: dict[str, Any] = {"position_ids": positions.long()}
        if self.separation is RowSeparation.MASK:
            arguments["attention_mask"] = block_mask(positions, self.mask_dtype)
        if self.separation is RowSeparation.LAYER_MASKS:
            arguments["attention_mask"] = {
                _FULL: block_mask(positions, self.mask_dtype),
                _SLIDING: block_mask(positions, self.mask_dtype, self.window),
            }
        return arguments


def block_mask(positions: Tensor, dtype: torch.dtype, window: int = 0) -> Tensor:
    """``float[b, 1, t, t]``, 0 where a token sees another of its own row before it, else the least
    number of the type, which eager attention adds and SDPA takes.
    """
    rows = (positions == 0).cumsum(dim=1)
    places = torch.arange(positions.shape[1], device=positions.device)
    distances = places[:, None] - places
    is_seen = (rows[:, :, None] == rows[:, None]) & (distances >= 0)
    if window:
        is_seen &= distances < window
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill(~is_seen, torch.finfo(dtype).min)[:, None]


class _TrialRows(NamedTuple):
    """Two rows behind each other, the same with another first row, and the second alone."""

    joint: Tensor
    other: Tensor
    alone: Tensor
    positions: Tensor

    @classmethod
    def draw(cls, vocabulary: int, length_most: int) -> "_TrialRows":
        first, second = _FIRST, _SECOND
        if length_most < first + second:
            first, second = length_most - length_most // 2, length_most // 2
        generator = np.random.Generator(np.random.Philox(_TRIAL_SEED))
        tokens = generator.integers(min(3, vocabulary - 1), vocabulary, 2 * first + second)
        a, other, b = np.split(tokens, [first, 2 * first])
        rows = (np.concatenate(each) for each in ((a, b), (other, b)))
        positions = np.concatenate([np.arange(first), np.arange(second)])
        return cls(*map(_batch_of_one, (*rows, b, positions)))


def _batch_of_one(tokens: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))[None]


def inputs_of(model: Any, *, sequence_length: int, length_most: int) -> SeparatedInputs:
    """How a base keeps packed rows apart, the least costly way that gives what a row gives alone.

    Takes a few passes of 18 tokens. The model is on the CPU, so that all machines find the same.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        sequence_length: Tokens of a sample.
        length_most: Tokens that the base takes.

    """
    vocabulary = model.get_input_embeddings().num_embeddings
    rows = _TrialRows.draw(vocabulary, min(length_most, sequence_length))
    alone = _logits(model, rows.alone, {})
    for inputs in _candidates(model, sequence_length):
        if _keeps_rows_apart(model, inputs, rows, alone):
            return inputs
    return SeparatedInputs(RowSeparation.ALONE)


def _candidates(model: Any, sequence_length: int) -> list[SeparatedInputs]:
    """Ways in order of what they cost. One mask for all layers would lift a layer's window."""
    config, dtype = model.config.get_text_config(), model.get_input_embeddings().weight.dtype
    sizes = [getattr(config, name, None) for name in _WINDOWS]
    windows = [size for size in sizes if isinstance(size, int) and 0 < size < sequence_length]
    candidates = [SeparatedInputs(RowSeparation.POSITIONS)]
    if _SLIDING in (getattr(config, "layer_types", None) or ()):
        window = getattr(config, "sliding_window", None) or 0
        candidates.append(SeparatedInputs(RowSeparation.LAYER_MASKS, dtype, window))
    elif not windows:
        candidates.append(SeparatedInputs(RowSeparation.MASK, dtype))
    return candidates


def _keeps_rows_apart(model: Any, inputs: SeparatedInputs, rows: _TrialRows, alone: Tensor) -> bool:
    start, arguments = rows.joint.shape[1] - rows.alone.shape[1], inputs.arguments(rows.positions)
    try:
        joint, other = (
            _logits(model, tokens, arguments)[:, start:] for tokens in (rows.joint, rows.other)
        )
    except Exception:  # noqa: BLE001 - a model that takes no such argument may fail in any way
        return False
    if not _difference(joint, other, alone) <= _LEAK.get(_precision(model), _LEAK_COARSE):
        return False
    return _difference(joint, alone, alone) <= _EQUAL.get(_precision(model), _NEARLY_EQUAL)


def check_causal(model: Any) -> None:
    """Refuse a base whose tokens see those behind them, tried on it.

    Raises:
        DatasetError: It is an encoder, or does not run.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = trial_tokens(vocabulary, _SECOND * 2)
    changed_tokens = tokens.clone()
    changed_tokens[0, -1] = (changed_tokens[0, -1] + 1) % vocabulary
    try:
        before, after = (_logits(model.eval(), each, {}) for each in (tokens, changed_tokens))
    except Exception as error:  # a class of transformers may raise anything
        raise DatasetError(
            f"base ({type(model).__name__}) does not run on text: {first_sentence(error)}."
            f" Fix: {_DECODER}"
        ) from error
    difference = _difference(after[:, :-1], before[:, :-1], before)
    if not difference <= _LEAK.get(_precision(model), _LEAK_COARSE):
        raise DatasetError(
            f"base is an encoder ({model.config.model_type}): its tokens see those behind them, so"
            f" that it cannot be trained to write the next one. Fix: {_DECODER}"
        )


@torch.no_grad()
def _logits(model: Any, tokens: Tensor, given: Mapping[str, Any]) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False, **given).logits
    return logits.float()


def _difference(one: Tensor, other: Tensor, scale: Tensor) -> float:
    return float((one - other).abs().max() / scale.std().clamp_min(1e-12))


def _precision(model: Any) -> torch.dtype:
    """float32 where all is computed in it."""
    if getattr(model, "is_quantized", False):
        return torch.bfloat16
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def trial_tokens(vocabulary: int, length_most: int) -> Tensor:
    """``int64[1, t]``: a few fixed tokens, by which the outputs of two models are compared."""
    return _TrialRows.draw(vocabulary, min(length_most, _FIRST + _SECOND)).alone
