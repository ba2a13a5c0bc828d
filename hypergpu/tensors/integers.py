"""Codecs that say every value as a whole number times a scale.

Four bits: whole numbers in [-7, 7] times one bfloat16 scale for each 256 values, 4.06 bits a value.

Record of 4,096 values: ``16 bfloat16 scales | 2,048 bytes``; of a shorter last record, as many
scales and 128-byte blocks as it needs, padded with zeros. In a block byte j holds value j in its
low half and value j + 128 in its high half, each plus 8.

Scales are bfloat16 and not float16, at the same size. float16 ends at 6e-8 and loses precision
below 6e-5, where the scales of late pseudo-gradients are (1e-6 / 7); bfloat16 has float32's range.
Its coarser steps cost nothing: both sides use the rounded scale, and 7 * (1 + 2**-8) still rounds
to 7.
"""

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.floats import bf16_bits, floats_of_bf16
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.records import RECORD, Codec, Flaw, record_runs

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


_INT8_SCALE_BYTES = 4
_INT8_CODE_MAX = np.float32(127)
_INT8_SCALE_BITS_END = np.uint32((127 + 121) << 23)
"""Bits of 2**121: any code times a scale below it is finite. Negative scales have larger bits."""


class Int8(Codec):
    """Error at most half a scale. A record whose scale would be below 2**-126 becomes zero."""

    name = "int8"

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        return count + _INT8_SCALE_BYTES * -(-count // RECORD)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`."""
        for run in record_runs(self, values.size):
            rows = values[run.values].reshape(run.rows, run.length)
            _encode_int8_rows(rows, out[run.bytes].reshape(run.rows, -1))

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        for run in record_runs(self, out.size):
            rows = out[run.values].reshape(run.rows, run.length)
            _decode_int8_rows(payload[run.bytes].reshape(run.rows, -1), rows)

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`. A negative scale is one too: no encoder writes one."""
        for run in record_runs(self, count):
            scales = payload[run.bytes].reshape(run.rows, -1)[:, :_INT8_SCALE_BYTES].copy()
            if (scales.view(np.uint32) >= _INT8_SCALE_BITS_END).any():
                return Flaw.NOT_FINITE
        return None


def _encode_int8_rows(values: Float32s, records: Octets) -> None:
    with np.errstate(invalid="ignore"):  # What is not finite gives a scale that is not finite.
        scales = largest_magnitude(values) / _INT8_CODE_MAX
        reciprocals = flushed_reciprocal(scales)
        records[:, :_INT8_SCALE_BYTES] = scales.view(np.uint8).reshape(-1, _INT8_SCALE_BYTES)
        quotients = values * reciprocals[:, None]
        codes: npt.NDArray[np.int8] = records[:, _INT8_SCALE_BYTES:].view(np.int8)
        np.rint(quotients, out=codes, casting="unsafe")


def _decode_int8_rows(records: Octets, out: Float32s) -> None:
    scales = records[:, :_INT8_SCALE_BYTES].copy().view(np.float32)  # [rows, 1]
    np.copyto(out, records[:, _INT8_SCALE_BYTES:].view(np.int8))
    np.multiply(out, scales, out=out)


_BLOCK = 256
_HALF = _BLOCK // 2
_INT4_SCALE_BYTES = 2
_BLOCK_BYTES = _INT4_SCALE_BYTES + _HALF
_INT4_CODE_MAX = np.float32(7)
_CODE_BIAS = 8
_INT4_SCALE_BITS_END = np.uint16((127 + 125) << 7)
"""Bits of 2**125: any code times a scale below it is finite. Negative scales have larger bits."""


class Int4(Codec):
    """Error at most half a scale. A block whose scale would be below 2**-126 becomes zero."""

    name = "int4"

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        return _BLOCK_BYTES * -(-count // _BLOCK)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`."""
        for run in record_runs(self, values.size):
            blocks = -(-run.length // _BLOCK)
            rows = values[run.values].reshape(run.rows, run.length)
            if run.length < blocks * _BLOCK:
                rows = np.pad(rows, ((0, 0), (0, blocks * _BLOCK - run.length)))
            records = out[run.bytes].reshape(run.rows, -1)
            _encode_int4_rows(rows.reshape(run.rows, blocks, _BLOCK), records)

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        for run in record_runs(self, out.size):
            blocks = -(-run.length // _BLOCK)
            records = payload[run.bytes].reshape(run.rows, -1)
            if run.length == blocks * _BLOCK:
                _decode_int4_rows(records, out[run.values].reshape(run.rows, blocks, _BLOCK))
            else:
                padded_values = np.empty((1, blocks, _BLOCK), np.float32)
                _decode_int4_rows(records, padded_values)
                out[run.values] = padded_values.reshape(-1)[: run.length]

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`. A negative scale is one too: no encoder writes one."""
        for run in record_runs(self, count):
            records = payload[run.bytes].reshape(run.rows, -1)
            scales = records[:, : _INT4_SCALE_BYTES * -(-run.length // _BLOCK)].copy()
            if (scales.view(np.uint16) >= _INT4_SCALE_BITS_END).any():
                return Flaw.NOT_FINITE
        return None


def _encode_int4_rows(values: Float32s, records: Octets) -> None:
    """Write ``float32[rows, blocks, 256]`` as ``uint8[rows, blocks * 130]``."""
    rows, blocks, _ = values.shape
    scales_end = _INT4_SCALE_BYTES * blocks
    with np.errstate(invalid="ignore"):  # What is not finite gives a scale that is not finite.
        codes_of_scales = bf16_bits(largest_magnitude(values) / _INT4_CODE_MAX)
        scales = floats_of_bf16(codes_of_scales)
        reciprocals = flushed_reciprocal(scales)
        quotients = values * reciprocals[:, :, None]
        codes = np.empty(values.shape, np.int8)
        np.rint(quotients, out=codes, casting="unsafe")
    codes += _CODE_BIAS
    halves = codes.view(np.uint8)
    records[:, :scales_end] = bf16_bits(scales).view(np.uint8)
    high = halves[:, :, _HALF:] << 4
    packed_codes = records[:, scales_end:].reshape(rows, blocks, _HALF)
    np.bitwise_or(high, halves[:, :, :_HALF], out=packed_codes)


def _decode_int4_rows(records: Octets, out: Float32s) -> None:
    """Read ``uint8[rows, blocks * 130]`` as ``float32[rows, blocks, 256]``."""
    rows, blocks, _ = out.shape
    scales_end = _INT4_SCALE_BYTES * blocks
    scales = floats_of_bf16(records[:, :scales_end].copy().view(np.uint16))  # [rows, blocks]
    packed_codes = records[:, scales_end:].reshape(rows, blocks, _HALF)
    codes = np.empty((rows, blocks, 2, _HALF), np.uint8)
    np.bitwise_and(packed_codes, 15, out=codes[:, :, 0])
    np.right_shift(packed_codes, 4, out=codes[:, :, 1])
    signed_codes = codes.view(np.int8)
    signed_codes -= _CODE_BIAS
    np.copyto(out, signed_codes.reshape(out.shape))
    np.multiply(out, scales[:, :, None], out=out)
