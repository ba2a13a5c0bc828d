"""One flat vector with named tensors in it: node and coordinator agree which number is which.

A model's bytes are ``float32 parameters | float32 statistics | int64 integers``, little-endian, in
layout order. Whatever is measured or trained lives elsewhere; here are only names, places and
views.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from hypergpu.experts import EXPERTS_MAX
from hypergpu.ids import Digest
from hypergpu.units import Bytes

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

LARGE_MIN = 4096
"""Elements from which a parameter is worth compressing; smaller ones travel as bfloat16."""

JSON_BYTES_MAX = 8 << 20
TENSORS_MAX = 65_536
NAME_LENGTH_MAX = 512
DIMENSIONS_MAX = 8
ELEMENTS_MAX = 1 << 36
"""Elements of a whole layout: 256 GiB of float32, and far below what overflows an int64 offset."""


class LayoutError(ValueError):
    """A layout that cannot be used. The text says which tensor and why."""


class TensorKind(Enum):
    """What a tensor is, which decides how it travels and how it is aggregated."""

    PARAMETER = "parameter"  # float32, trained: differences are sent and averaged
    STATISTIC = "statistic"  # float32, measured (BatchNorm): values are sent and averaged
    INTEGER = "integer"  # int64 counters: values are sent, the lowest slot's are taken


_KIND_ORDER = {TensorKind.PARAMETER: 0, TensorKind.STATISTIC: 2, TensorKind.INTEGER: 3}


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named tensor. Its element type follows from its kind."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind = TensorKind.PARAMETER
    expert: int | msgspec.UnsetType = msgspec.UNSET
    """Expert of a mixture that it belongs to; unset, and left out of the JSON: all share it."""

    @property
    def count(self) -> int:
        """Elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def is_large(self) -> bool:
        """Whether it is a parameter that the codec compresses."""
        return self.kind is TensorKind.PARAMETER and self.count >= LARGE_MIN


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Every tensor of a model in the order of its bytes. Build it with `layout_of`.

    Order: large parameters, small parameters, statistics, integers; by name within each.
    """

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def large_count(self) -> int:
        """Elements of the parameters that the codec compresses; they come first."""
        return sum(tensor.count for tensor in self.tensors if tensor.is_large)

    @cached_property
    def small_count(self) -> int:
        """Elements of the parameters that travel as bfloat16 or float32."""
        return self.parameters_count - self.large_count

    @cached_property
    def parameters_count(self) -> int:
        """Elements of all parameters."""
        return self._count_of(TensorKind.PARAMETER)

    @cached_property
    def statistics_count(self) -> int:
        """Elements of all statistics."""
        return self._count_of(TensorKind.STATISTIC)

    @cached_property
    def integers_count(self) -> int:
        """Elements of all integer tensors."""
        return self._count_of(TensorKind.INTEGER)

    @cached_property
    def model_bytes(self) -> Bytes:
        """Exact size of a model blob."""
        floats = self.parameters_count + self.statistics_count
        return Bytes(4 * floats + 8 * self.integers_count)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Each tensor's first element, counted within its kind (all parameters are one kind)."""
        ends = dict.fromkeys(TensorKind, 0)
        starts: list[int] = []
        for tensor in self.tensors:
            starts.append(ends[tensor.kind])
            ends[tensor.kind] += tensor.count
        return tuple(starts)

    @cached_property
    def digest(self) -> Digest:
        """BLAKE3 of the canonical JSON."""
        return Digest(blake3(self.to_json()).hexdigest())

    def to_json(self) -> bytes:
        """Canonical JSON: no blanks, fields and tensors in their fixed order."""
        return msgspec.json.encode(self)

    def _count_of(self, kind: TensorKind) -> int:
        return sum(tensor.count for tensor in self.tensors if tensor.kind is kind)


def _order(tensor: TensorSpec) -> tuple[int, str]:
    is_small_parameter = tensor.kind is TensorKind.PARAMETER and not tensor.is_large
    return (1 if is_small_parameter else _KIND_ORDER[tensor.kind], tensor.name)


def layout_of(tensors: Iterable[TensorSpec]) -> Layout:
    """Put tensors in layout order.

    Raises:
        LayoutError: A name occurs twice, or a size is out of bounds.
    """
    layout = Layout(tuple(sorted(tensors, key=_order)))
    _refuse_out_of_bounds(layout)
    return layout


def layout_from_json(text: bytes | str) -> Layout:
    """Read a layout that another process sent, trusting nothing.

    Raises:
        LayoutError: It is not canonical JSON of an ordered layout within the bounds above.
    """
    if len(text) > JSON_BYTES_MAX:
        raise LayoutError(f"a layout of {len(text)} bytes is over the limit of {JSON_BYTES_MAX}")
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise LayoutError(f"not a layout: {error}") from error
    _refuse_out_of_bounds(layout)
    if list(layout.tensors) != sorted(layout.tensors, key=_order):
        raise LayoutError("the tensors are not in layout order: build it with layout_of")
    return layout


def _refuse_out_of_bounds(layout: Layout) -> None:
    if len(layout.tensors) > TENSORS_MAX:
        raise LayoutError(f"{len(layout.tensors)} tensors are over the limit of {TENSORS_MAX}")
    seen_names: set[str] = set()
    elements = 0
    for tensor in layout.tensors:
        if tensor.name in seen_names:
            raise LayoutError(f"tensor {tensor.name[:80]!r} occurs twice")
        seen_names.add(tensor.name)
        _refuse_bad_tensor(tensor)
        elements += tensor.count
        if elements > ELEMENTS_MAX:
            raise LayoutError(f"the elements are over the limit of {ELEMENTS_MAX}")


def _refuse_bad_tensor(tensor: TensorSpec) -> None:
    name = tensor.name[:80]
    if not 0 < len(tensor.name) <= NAME_LENGTH_MAX:
        raise LayoutError(f"tensor {name!r}: the name must have 1 to {NAME_LENGTH_MAX} characters")
    if len(tensor.shape) > DIMENSIONS_MAX:
        raise LayoutError(f"tensor {name!r}: over {DIMENSIONS_MAX} dimensions")
    if any(not 0 <= extent <= ELEMENTS_MAX for extent in tensor.shape):
        raise LayoutError(f"tensor {name!r}: shape {list(tensor.shape)} is out of bounds")
    if tensor.expert is not msgspec.UNSET and not 0 <= tensor.expert < EXPERTS_MAX:
        raise LayoutError(f"tensor {name!r}: expert {tensor.expert} is not one of {EXPERTS_MAX}")


class Flat(NamedTuple):
    """The three vectors of one model or of one update, in layout order.

    In an update ``parameters`` holds the pseudo-gradient; the other two hold values after training.
    """

    parameters: Float32s
    statistics: Float32s
    integers: Int64s

    @classmethod
    def view(cls, layout: Layout, model: Octets) -> Self:
        """See a model blob as its vectors, without a copy; read-only if the buffer is.

        Raises:
            LayoutError: The buffer does not have exactly ``layout.model_bytes``.
        """
        if model.size != layout.model_bytes:
            raise LayoutError(f"a model has {layout.model_bytes} bytes, not {model.size}")
        parameters_end = 4 * layout.parameters_count
        floats_end = parameters_end + 4 * layout.statistics_count
        return cls(
            model[:parameters_end].view(np.float32),
            model[parameters_end:floats_end].view(np.float32),
            model[floats_end:].view(np.int64),
        )

    @classmethod
    def empty(cls, layout: Layout) -> Self:
        """Uninitialised vectors of the layout's sizes."""
        return cls(
            np.empty(layout.parameters_count, np.float32),
            np.empty(layout.statistics_count, np.float32),
            np.empty(layout.integers_count, np.int64),
        )

    def of_kind(self, kind: TensorKind) -> Float32s | Int64s:
        """The vector that holds tensors of a kind."""
        if kind is TensorKind.INTEGER:
            return self.integers
        return self.parameters if kind is TensorKind.PARAMETER else self.statistics


def pack(layout: Layout, tensors: Mapping[str, npt.NDArray[np.generic]], out: Flat) -> None:
    """Copy named tensors into flat vectors.

    Args:
        tensors: One array per name of the layout, of its shape, in any numeric type.
        out: Vectors of the layout's sizes; every element is overwritten.

    Raises:
        LayoutError: A tensor is missing or has another shape.
    """
    for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
        array = tensors.get(tensor.name)
        if array is None:
            raise LayoutError(f"tensor {tensor.name!r} is missing")
        if array.shape != tensor.shape:
            raise LayoutError(f"tensor {tensor.name!r} has shape {array.shape}, not {tensor.shape}")
        out.of_kind(tensor.kind)[start : start + tensor.count] = array.reshape(-1)


def unpack(layout: Layout, flat: Flat) -> dict[str, npt.NDArray[np.generic]]:
    """Name the tensors inside flat vectors; views, so writing to one writes to the other."""
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
        vector = flat.of_kind(tensor.kind)
        tensors[tensor.name] = vector[start : start + tensor.count].reshape(tensor.shape)
    return tensors
