"""Adapters of a ring that trained, as a node has them that computes its stages again."""

from typing import TYPE_CHECKING

import numpy as np

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import RingTraining
from hypergpu.serving.check_messages import TakeAdapterValues
from hypergpu.units import Bytes
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError

if TYPE_CHECKING:
    from hypergpu.workloads.slices.slice_adapter import SliceAdapter

BYTES_MOST = Bytes(1 << 30)
"""Size of the values of all layers at most."""


class AdapterValues:
    """Values of the adapters of layers, of the newest round that the coordinator has stored.

    Args:
        training: Settings of the adapter; None: the ring trained none.
        layers: Of the whole model.
        bytes_most: See `BYTES_MOST`.
    """

    def __init__(
        self, training: RingTraining | None, layers: int, bytes_most: Bytes = BYTES_MOST
    ) -> None:
        self._training = training
        self._layers = layers
        self._bytes_most = bytes_most
        self._values: dict[int, bytearray] = {}

    def take(self, request: TakeAdapterValues) -> str:
        """Keep a part of a layer's values; gives why it is not kept, or nothing."""
        if self._training is None or request.layer >= self._layers:
            return f"there is no adapter of layer {request.layer}"
        if not request.start:
            self._values[request.layer] = bytearray()
        values = self._values.get(request.layer, bytearray())
        if request.start != len(values):
            return f"parts of the adapter of layer {request.layer} come in order"
        if sum(map(len, self._values.values())) + len(request.values) > self._bytes_most:
            return f"adapters of all layers have more than {self._bytes_most:,} bytes"
        values += request.values
        return ""

    def set_on(self, adapter: "SliceAdapter", span: LayerSpan) -> None:
        """Give the adapter of a slice its values.

        Raises:
            SliceError: They are not there, or are not those of such an adapter.
        """
        for layer in range(span.first, span.end):
            if layer not in self._values:
                raise SliceError(f"the adapter of layer {layer} was not given")
            values = self._values[layer]
            if len(values) % 4:
                raise SliceError(f"the adapter of layer {layer} ends within a number")
            adapter.set_layer(layer, np.frombuffer(bytes(values), "<f4"))

    def add_to(self, layer_slice: LayerSlice) -> None:
        """Add the adapter to a slice that was read, if the ring trained one.

        Raises:
            SliceError: As `set_on`; or the slice takes no such adapter.
        """
        if self._training is None:
            return
        # What it needs of peft takes seconds to import, and only rings that trained need it.
        from hypergpu.workloads.slices.slice_adapter import SliceAdapter

        self.set_on(SliceAdapter(layer_slice, self._training), layer_slice.span)
