"""Attention over one row of tokens that belong to many sessions, without padding and without masks.

Keys and values are stored by session and position. A pass overwrites what lies at its positions, so
that the same pass may be computed twice, and what a rejected draft left behind is never read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

RAGGED = "hypergpu_ragged"
"""Name of the attention among those of transformers."""
_TOKENS_FIRST = 64
"""Positions that a session's first storage has; it doubles as it fills."""


class SessionKeys:
    """Keys and values of one session in the layers of one slice."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(
        self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values from a position on; gives all up to the last one written.

        Args:
            layer: Index of the layer in the slice.
            start: Position of the first token.
            keys: ``[heads, tokens, width]``.
            values: The same; the width may differ.
        """
        end = start + keys.shape[1]
        stored_keys, stored_values = self._layers.get(layer, (None, None))
        all_keys = _with_room(stored_keys, keys, end)
        all_values = _with_room(stored_values, values, end)
        all_keys[:, start:end], all_values[:, start:end] = keys, values
        self._layers[layer] = (all_keys, all_values)
        return all_keys[:, :end], all_values[:, :end]

    @property
    def room_tokens(self) -> int:
        """Positions that there is room for."""
        return max((keys.shape[1] for keys, _ in self._layers.values()), default=0)

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes."""
        tensors = [tensor for pair in self._layers.values() for tensor in pair]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class PassingKeys(SessionKeys):
    """Keys and values of a row that is computed at once, from its first token on: none is stored,
    so that gradients go through them.
    """

    def write(
        self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give keys and values back."""
        if start:
            raise ValueError(f"layer {layer}: a row is computed from its first token on")
        return keys, values


def _with_room(storage_before: torch.Tensor | None, like: torch.Tensor, end: int) -> torch.Tensor:
    """A storage of at least ``end`` positions with what was stored before."""
    if storage_before is not None and storage_before.shape[1] >= end:
        return storage_before
    room = max(_TOKENS_FIRST, end if storage_before is None else 2 * end)
    storage = like.new_zeros(like.shape[0], room, like.shape[2])
    if storage_before is not None:
        storage[:, : storage_before.shape[1]] = storage_before
    return storage


class SessionSegment(NamedTuple):
    """Consecutive tokens of one session in a pass."""

    keys: SessionKeys
    start: int
    """Position of the first token in its session."""
    tokens: int


class RaggedPass:
    """The pass that a slice computes: stands where transformers expects a cache."""

    def __init__(self) -> None:
        self.segments: Sequence[SessionSegment] = ()
        self.is_compileable = False

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give keys and values back: the attention stores them by session."""
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the pass: 0, as positions are stated."""
        return 0


class _AttentionSettings(NamedTuple):
    """What an architecture changes of plain attention."""

    scale: float | None
    window: int | None
    cap: float | None
    sinks: torch.Tensor | None
    """A logit for each head that takes weight and gives no value (gpt-oss)."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "_AttentionSettings":
        return cls(
            settings.get("scaling"),
            settings.get("sliding_window"),
            settings.get("softcap"),
            settings.get("s_aux"),
        )


def attend(  # transformers fixes the signature
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each token over its own session's positions up to its own.

    Args:
        module: The attention layer; ``ragged_pass`` was set on it by its slice.
        query: ``[1, heads, tokens, width]``; key and value with as many heads or fewer.
        key: See ``query``.
        value: See ``query``.
        settings: ``scaling``, ``sliding_window``, ``softcap`` and ``s_aux``, as transformers names
            them.

    Returns:
        ``[1, tokens, heads, width]``.
    """
    rules, first, outputs = _AttentionSettings.of(settings), 0, []
    for segment in module.ragged_pass.segments:
        here = slice(first, first + segment.tokens)
        keys, values = segment.keys.write(
            module.layer_idx, segment.start, key[0, :, here], value[0, :, here]
        )
        mask = _visible(segment, rules.window, query.device)
        compute = _plain if rules.cap is None and rules.sinks is None else _explicit
        outputs.append(compute(query[0, :, here], keys, values, mask, rules))
        first = here.stop
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], None


def _visible(
    segment: SessionSegment, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which positions each token sees, ``bool[tokens, positions]``; None: all."""
    if segment.tokens == 1 and not window:
        return None
    end = segment.start + segment.tokens
    own_places = torch.arange(segment.start, end, device=device)[:, None]
    places = torch.arange(end, device=device)[None]
    is_visible = places <= own_places
    return is_visible & (places > own_places - window) if window else is_visible


def _plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rules: _AttentionSettings,
) -> torch.Tensor:
    output = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=rules.scale,
        enable_gqa=query.shape[0] != keys.shape[0],
    )
    return output[0]


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    rules: _AttentionSettings,
) -> torch.Tensor:
    """Attention with capped scores (Gemma 2) or sinks (gpt-oss), which torch's own lacks."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scale = rules.scale if rules.scale is not None else query.shape[-1] ** -0.5
    scores = query @ keys.transpose(1, 2) * scale  # [heads, tokens, positions]
    if rules.cap is not None:
        scores = rules.cap * torch.tanh(scores / rules.cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return weights[..., : keys.shape[1]] @ values


AttentionInterface.register(RAGGED, attend)
