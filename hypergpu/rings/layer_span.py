"""Runs of a model's layers, and the nodes that hold them."""

import msgspec

from hypergpu.ids import NodeId


class LayerSpan(msgspec.Struct, frozen=True, order=True):
    """Layers of a model, from ``first`` to before ``end``."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"layers {self.first} to {self.end - 1}" if self.count > 1 else f"layer {self.first}"

    @property
    def count(self) -> int:
        """Layers in it."""
        return self.end - self.first


class PlacedStage(msgspec.Struct, frozen=True):
    """Layers that a node is to hold."""

    node: NodeId
    span: LayerSpan


class RingShare(msgspec.Struct, frozen=True):
    """What one of several rings trained in a round that counts."""

    ring: int
    """From 0 on."""
    loss: float
    """Mean of its tokens that count."""
    tokens: int
    """Tokens that it trained."""


def gaps(spans: tuple[LayerSpan, ...], layers: int) -> tuple[LayerSpan, ...]:
    """Runs of layers that no span has, in order.

    Args:
        spans: Any, without overlaps.
        layers: Of the whole model.
    """
    gap_spans, next_layer = [], 0
    for span in (*sorted(spans), LayerSpan(layers, layers)):
        if span.first > next_layer:
            gap_spans.append(LayerSpan(next_layer, span.first))
        next_layer = max(next_layer, span.end)
    return tuple(gap_spans)
