"""A run of a model's layers."""

import msgspec


class LayerSpan(msgspec.Struct, frozen=True, order=True):
    """Layers of a model, from ``first`` to before ``end``."""

    first: int
    end: int

    @property
    def count(self) -> int:
        """Layers in it."""
        return self.end - self.first


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
