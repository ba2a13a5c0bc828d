"""Eight bits a value and a scale a group, and the scales that integer schemes share."""

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.scheme import RECORD, Flaw, Scheme, record_runs

_MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)
_INFINITE_BITS = np.uint32(0x7F80_0000)
_SCALE_MIN = np.float32(2.0**-126)


def largest_magnitude(values: Float32s) -> Float32s:
    """Largest absolute value along the last axis; infinite for a row with anything not finite.

    Magnitudes of floats order like their bits, and a maximum of integers is twice as fast.
    """
    bits = values.view(np.uint32) & _MAGNITUDE_BITS
    largest: npt.NDArray[np.uint32] = np.minimum(bits.max(axis=-1), _INFINITE_BITS)
    return largest.view(np.float32)


def flushed_reciprocal(scales: Float32s) -> Float32s:
    """Set scales below 2**-126 to zero, in place, and give 1 / scale with 0 for those.

    A reciprocal of a smaller scale could be infinite; such values wait in the residual until they
    grow.
    """
    is_usable = scales >= _SCALE_MIN
    scales *= is_usable
    reciprocals = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=reciprocals, where=is_usable)
    return reciprocals


_SCALE_BYTES = 4
_CODE_MAX = np.float32(127)
_SCALE_BITS_END = np.uint32((127 + 121) << 23)
"""Bits of 2**121: any code times a scale below it is finite. Negative scales have larger bits."""


class Int8(Scheme):
    """Error at most half a scale. A record whose scale would be below 2**-126 becomes zero."""

    name = "int8"

    def encoded_bytes(self, count: int) -> int:
        """See `Scheme`."""
        return count + _SCALE_BYTES * -(-count // RECORD)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Scheme`."""
        for run in record_runs(self, values.size):
            rows = values[run.values].reshape(run.rows, run.length)
            _encode_rows(rows, out[run.bytes].reshape(run.rows, -1))

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Scheme`."""
        for run in record_runs(self, out.size):
            rows = out[run.values].reshape(run.rows, run.length)
            _decode_rows(payload[run.bytes].reshape(run.rows, -1), rows)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Scheme`. A negative scale is one too: no encoder writes one."""
        for run in record_runs(self, count):
            scales = payload[run.bytes].reshape(run.rows, -1)[:, :_SCALE_BYTES].copy()
            if (scales.view(np.uint32) >= _SCALE_BITS_END).any():
                return Flaw.NOT_FINITE
        return None


def _encode_rows(values: Float32s, records: Octets) -> None:
    with np.errstate(invalid="ignore"):  # What is not finite gives a scale that is not finite.
        scales = largest_magnitude(values) / _CODE_MAX
        reciprocals = flushed_reciprocal(scales)
        records[:, :_SCALE_BYTES] = scales.view(np.uint8).reshape(-1, _SCALE_BYTES)
        quotients = values * reciprocals[:, None]
        codes: npt.NDArray[np.int8] = records[:, _SCALE_BYTES:].view(np.int8)
        np.rint(quotients, out=codes, casting="unsafe")


def _decode_rows(records: Octets, out: Float32s) -> None:
    scales = records[:, :_SCALE_BYTES].copy().view(np.float32)  # [rows, 1]
    np.copyto(out, records[:, _SCALE_BYTES:].view(np.int8))
    np.multiply(out, scales, out=out)
