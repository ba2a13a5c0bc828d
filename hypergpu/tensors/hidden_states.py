"""Hidden states of a model as bytes, row by row: what stages of a ring send to each other.

Few dimensions of a residual stream are huge. One scale a row that has to reach them leaves the
others no digits, so ``int8o`` takes the four largest values of a row out before it scales the rest
(outliers, as in Dettmers et al. 2022, arXiv:2208.07339). Rows are independent: rows of one message
may be joined with rows of another, and a part of them sent again.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from hypergpu.tensors.floats import bf16_bits, floats_of_bf16

WIDTH_MOST = 1 << 16
"""Values of a row at most: a place takes two bytes."""
StateRows = NDArray[np.float32]


class StatesError(ValueError):
    """Hidden states that cannot be sent or taken: wrong size, or numbers that are not finite."""


class StateCodec(ABC):
    """One way to write rows of hidden states."""

    name: str

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """Size of one row."""

    def encode(self, rows: StateRows) -> bytes:
        """Write ``float32[rows, width]``.

        Raises:
            StatesError: A number is not finite, or the width is none that a row may have.
        """
        if rows.ndim != 2 or not 0 < rows.shape[1] <= WIDTH_MOST:
            raise StatesError(f"hidden states of shape {rows.shape}")
        if not np.isfinite(rows).all():
            raise StatesError("hidden states hold numbers that are not finite")
        return self._write_rows(np.ascontiguousarray(rows, np.float32))

    def decode(self, content: bytes, width: int) -> StateRows:
        """Read rows of a width; gives a fresh ``float32[rows, width]``.

        Raises:
            StatesError: The size is no whole number of rows, or a number is not finite.
        """
        row_bytes = self.row_bytes(width)
        if not content or len(content) % row_bytes:
            raise StatesError(
                f"hidden states have {len(content)} bytes, and a row of {self.name} has {row_bytes}"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, row_bytes)
        rows = self._read_rows(records, width)
        if not np.isfinite(rows).all():
            raise StatesError("hidden states hold numbers that are not finite")
        return rows

    @abstractmethod
    def _write_rows(self, rows: StateRows) -> bytes: ...

    @abstractmethod
    def _read_rows(self, records: NDArray[np.uint8], width: int) -> StateRows: ...


class Float32States(StateCodec):
    """Little-endian float32: nothing is lost."""

    name = "float32"

    def row_bytes(self, width: int) -> int:
        """See `StateCodec`."""
        return 4 * width

    def _write_rows(self, rows: StateRows) -> bytes:
        return rows.astype("<f4", copy=False).tobytes()

    def _read_rows(self, records: NDArray[np.uint8], width: int) -> StateRows:
        return np.ascontiguousarray(records).view("<f4").astype(np.float32)


_OUTLIERS = 4
_SCALE_BYTES = 2
_PLACES_END = _SCALE_BYTES + 2 * _OUTLIERS
_HEAD_BYTES = _PLACES_END + 2 * _OUTLIERS
_CODE_MAX = np.float32(127)
_LARGEST_BF16 = np.float32(3.3895313892515355e38)
_SCALE_LEAST = np.float32(2.0**-126)


class Int8OutlierStates(StateCodec):
    """``bfloat16 scale | 4 uint16 places | 4 bfloat16 values | int8[width]`` for each row.

    The error of a value is half a scale, of the four largest 2**-9 of the value.
    """

    name = "int8o"

    def row_bytes(self, width: int) -> int:
        """See `StateCodec`."""
        return _HEAD_BYTES + width

    def _write_rows(self, rows: StateRows) -> bytes:
        count, width = rows.shape
        outliers = min(_OUTLIERS, width)
        places = np.zeros((count, _OUTLIERS), np.int64)
        places[:, :outliers] = np.argpartition(np.abs(rows), width - outliers, axis=1)[
            :, -outliers:
        ]
        largest = np.take_along_axis(rows, places, axis=1)
        np.clip(largest, -_LARGEST_BF16, _LARGEST_BF16, out=largest)
        rest = rows.copy()
        np.put_along_axis(rest, places, np.float32(0), axis=1)
        scales = floats_of_bf16(bf16_bits(np.abs(rest).max(axis=1) / _CODE_MAX))
        # A smaller scale has no reciprocal: such a row is its outliers alone.
        scales[scales < _SCALE_LEAST] = 0
        divisors = np.where(scales > 0, scales, np.float32(1))
        codes = np.where(scales[:, None] > 0, np.rint(rest / divisors[:, None]), np.float32(0))
        records = np.empty((count, self.row_bytes(width)), np.uint8)
        records[:, :_SCALE_BYTES] = bf16_bits(scales).astype("<u2")[:, None].view(np.uint8)
        records[:, _SCALE_BYTES:_PLACES_END] = places.astype("<u2").view(np.uint8)
        records[:, _PLACES_END:_HEAD_BYTES] = bf16_bits(largest).astype("<u2").view(np.uint8)
        whole_codes = np.clip(codes, -_CODE_MAX, _CODE_MAX).astype(np.int8)
        records[:, _HEAD_BYTES:] = whole_codes.view(np.uint8)
        return records.tobytes()

    def _read_rows(self, records: NDArray[np.uint8], width: int) -> StateRows:
        def numbers(first: int, end: int) -> NDArray[np.uint16]:
            return np.ascontiguousarray(records[:, first:end]).view("<u2").astype(np.uint16)

        scales = floats_of_bf16(numbers(0, _SCALE_BYTES))  # [rows, 1]
        places = numbers(_SCALE_BYTES, _PLACES_END).astype(np.int64)
        if not (np.isfinite(scales).all() and (scales >= 0).all()) or (places >= width).any():
            raise StatesError("a row states a scale or a place that no encoder writes")
        codes = np.ascontiguousarray(records[:, _HEAD_BYTES:]).view(np.int8)
        with np.errstate(over="ignore"):  # What becomes infinite is refused by the caller.
            rows = codes.astype(np.float32) * scales
        np.put_along_axis(rows, places, floats_of_bf16(numbers(_PLACES_END, _HEAD_BYTES)), axis=1)
        return rows


_CODECS: dict[str, StateCodec] = {
    codec.name: codec for codec in (Float32States(), Int8OutlierStates())
}
STATE_CODECS = tuple(_CODECS)
"""Names of all."""


def state_codec(name: str) -> StateCodec:
    """The codec of a name.

    Raises:
        ValueError: There is none.
    """
    codec = _CODECS.get(name)
    if codec is None:
        raise ValueError(f"no codec {name!r} of hidden states: use one of {', '.join(_CODECS)}")
    return codec
